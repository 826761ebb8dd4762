"""With one replica nothing is wrapped, and programs go from one to several and back."""

import functools
import re

import jax
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

replica = js.get_replica_context


@functools.cache
def ones():
    """Strategies of one replica."""
    device = jax.devices()[2]
    return {
        "default": js.get_strategy(),
        "one device": js.OneDeviceStrategy(device),
        "mirrored": js.MirroredStrategy([device]),
        "several processes": js.MultiWorkerMirroredStrategy(
            js.cluster_resolver.SimpleClusterResolver({})
        ),
        "central": js.experimental.CentralStorageStrategy([device], jax.devices()[5]),
    }


NAMES = ["default", "one device", "mirrored", "central"]
EAGER = js.InputOptions(experimental_per_replica_buffer_size=0)


def is_plain(value):
    return isinstance(value, jax.Array)


@each_of("name", NAMES)
def test_nothing_is_wrapped(name):
    strategy = ones_of(name)
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {"x": [1.0, 2.0], "flag": True}
    )
    assert is_plain(made["x"]) and is_plain(made["flag"])
    assert (made["x"] + 1).tolist() == [2, 3] and bool(made["flag"])
    x = strategy.per_replica([3.0])
    out = strategy.run(
        lambda x: {"x": x, "id": replica().replica_id_in_sync_group}, (x,)
    )
    assert float(out["x"]) == 3 and int(out["id"]) == 0
    assert f"{out['x'] + 1:.2f}" == "4.00"
    assert strategy.experimental_local_results(out) == ({"x": 3.0, "id": 0},)
    again = strategy.run(lambda x: 2 * x, (out["x"],))
    assert float(again) == 6


def ones_of(name):
    return ones()[name]


@each_of("name", NAMES)
def test_what_is_explicitly_per_replica_stays_so_until_a_step(name):
    strategy = ones_of(name)
    x = strategy.per_replica([3.0])
    assert isinstance(x, js.PerReplica) and x.local(0) == 3
    assert strategy.reduce("sum", x) == 3
    assert strategy.gather(strategy.per_replica([[1, 2]])).tolist() == [1, 2]
    assert float(strategy.run(lambda x: x + 1, (x,))) == 4
    assert float(strategy.run(lambda x: x + 1, (js.PerReplica(np.ones((1,))),))) == 2


@each_of(
    "name, ahead", (("default", 0), ("one device", 2), ("mirrored", 0), ("central", 2))
)
def test_batches_have_the_rows_that_there_are(name, ahead):
    strategy = ones_of(name)
    options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
    rows = [np.arange(4.0), np.arange(5.0, 8.0)]
    for batches in (
        strategy.experimental_distribute_dataset(rows, options),
        strategy.distribute_datasets_from_function(lambda _: rows, options),
    ):
        whole, rest = batches
        assert whole.tolist() == [0, 1, 2, 3] and (rest * 2).tolist() == [10, 12, 14]
        assert strategy.run(js.batch_mask, (rest,)).tolist() == [True] * 3
        assert float(strategy.run(js.masked_mean, (rest,))) == 6
        assert strategy.reduce("mean", rest, axis=0) == 6
        assert strategy.gather(rest).tolist() == [5, 6, 7]
        (own,) = strategy.experimental_local_results(rest)
        assert own.tolist() == [5, 6, 7]


def test_batches_of_one_replica_may_be_larger_than_the_first():
    strategy = ones_of("mirrored")
    rows = [np.arange(i) for i in (2, 3, 1)]
    found = strategy.experimental_distribute_dataset(rows, EAGER)
    assert [batch.shape for batch in found] == [(2,), (3,), (1,)]
    for remainder, shapes in (("drop", [(2,), (3,)]),):
        options = js.InputOptions(remainder=remainder)
        found = strategy.experimental_distribute_dataset(rows, options)
        assert [batch.shape for batch in found] == shapes


# Programs that are the same whatever the number of replicas is.


def strategy_of(n):
    return ones_of("one device") if n == 1 else js.MirroredStrategy(jax.devices()[:n])


def training(strategy):
    """The README's loop, over batches that do not divide."""
    x = np.linspace(-1, 1, 22).astype(np.float32)
    data = {"x": x, "y": 3 * x - 1}

    @strategy.run
    def step(w, batch):
        def loss(w):
            error = (w[0] * batch["x"] + w[1] - batch["y"]) ** 2
            return js.masked_mean(error)

        value, grad = jax.value_and_grad(loss)(w)
        value, grad = replica().all_reduce("mean", (value, grad))
        return w - 0.3 * grad, value

    w, losses = strategy.mirror(np.zeros(2, np.float32)), []
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(js.batches(data, 8)):
            w, loss = step(w, batch)
            losses.append(float(loss))
    return [*losses, *w.tolist()]


def evaluation(strategy):
    """Sums in variables, reductions over rows, and predictions in order."""
    with strategy.scope():
        count = js.Variable(0, synchronization="on_read", aggregation="sum")
        best = js.Variable(0.0)

    @strategy.run
    def predict(x):
        count.assign_add(js.batch_mask(x).sum().astype(count.dtype))
        return x * 2

    rows, total = [], 0.0
    dataset = strategy.experimental_distribute_dataset(js.batches(np.arange(11.0), 8))
    for batch in dataset:
        out = predict(batch)
        mask = strategy.gather(strategy.run(js.batch_mask, (batch,)))
        rows += np.asarray(strategy.gather(out))[np.asarray(mask)].tolist()
        rows += strategy.gather(batch).tolist()
        total += float(strategy.reduce("sum", batch, axis=0))
        for own in strategy.experimental_local_results(batch):
            total += float(own.sum())
        mean = strategy.reduce("mean", batch, axis=0)
        strategy.extended.update(best, lambda v, x: v.assign(x), args=(mean,))
    return [*rows, total, float(count.numpy()), float(best.numpy())]


WANTED = {
    evaluation: [
        *[2.0 * i for i in range(8)], *range(8), *[16.0, 18.0, 20.0], *[8, 9, 10],
        110.0, 11.0, 9.0,
    ],
}  # fmt: skip


@pytest.mark.slow
def test_the_same_program_runs_on_one_replica_and_on_several():
    for program in (training, evaluation):
        one, several = (program(strategy_of(n)) for n in (1, 4))
        np.testing.assert_allclose(one, several, rtol=1e-5, atol=1e-5)
        if program in WANTED:
            np.testing.assert_allclose(one, WANTED[program], rtol=1e-6)


@each_of("num_replicas", (1, 3))
def test_one_device_communicates_with_nobody(num_replicas):
    # XLA keeps collectives of one device, which cost a third of a small step.
    strategy = js.MirroredStrategy(jax.devices()[2:3], num_replicas=num_replicas)

    def step(x):
        context = replica()
        axis = "replica"
        shifts = [(i, (i + 1) % num_replicas) for i in range(num_replicas)]
        return {
            "sum": context.all_reduce("sum", {"x": x, "y": x.astype("int32")}),
            "largest": jax.lax.pmax(x, axis),
            "all": jax.lax.all_gather(x, axis),
            "shifted": jax.lax.ppermute(x, axis, shifts),
            "swapped": jax.lax.all_to_all(
                jax.numpy.tile(x, 3)[:num_replicas], axis, 0, 0
            ),
            "id": jax.lax.axis_index(axis),
        }

    rows = np.arange(2.0 * num_replicas, dtype=np.float32).reshape(num_replicas, 2)
    x = strategy.per_replica(rows)
    text = strategy.compile(step, (x,)).compiled.as_text()
    found = re.findall(r"all-\w+\(|collective-\w+\(|reduce-scatter\(", text)
    assert not found
    out = strategy.run(step, (x,))
    locals_ = strategy.experimental_local_results(out)
    for i, each in enumerate(locals_):
        np.testing.assert_array_equal(each["sum"]["x"], rows.sum(0))
        np.testing.assert_array_equal(each["sum"]["y"], rows.sum(0))
        np.testing.assert_array_equal(each["largest"], rows.max(0))
        np.testing.assert_array_equal(each["all"], rows)
        np.testing.assert_array_equal(each["shifted"], rows[i - 1])
        swapped = np.stack([np.tile(row, 3)[i] for row in rows])
        np.testing.assert_array_equal(each["swapped"], swapped)
        assert each["id"] == i
