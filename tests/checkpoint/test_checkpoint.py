"""Checkpoints: what is saved under one strategy and restored under another."""

import asyncio
import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager, MismatchError


def manager_of(folder, *args, **kwargs):
    return CheckpointManager(folder, *args, **kwargs)


def saved(folder, state, step=1, **kwargs):
    with manager_of(folder, asynchronous=False) as manager:
        assert manager.save(step, state, **kwargs)


def restored(folder, like, strategy=None, step=None, **kwargs):
    with manager_of(folder, strategy) as manager:
        return manager.restore(like, step, **kwargs)


def plainly(folder, name):
    """An array as Orbax reads it without us."""
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
    args = ocp.args.PyTreeRestore({name: 0}, restore_args=how, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder, args=args)[name]


def copies(variable):
    """All copies of an on-read variable."""
    return np.asarray(variable.distributed().stacked)


# Variables: numbers recorded from TensorFlow (`tests/oracle`).


def on_read(strategy, aggregation, versions=None, dtype=jnp.float32):
    with strategy.scope():
        variable = js.Variable(
            0, dtype=dtype, synchronization="on_read", aggregation=aggregation
        )
    if versions is not None:
        give = strategy.per_replica(list(np.asarray(versions, dtype)))
        strategy.run(lambda v, x: (v.assign(x), None)[1], (variable, give))
    return variable


@each_of(
    "aggregation, value, copies_after",
    [
        ("sum", 7.0, [3.5, 3.5]),
        ("mean", 3.5, [3.5, 3.5]),
        ("only_first_replica", 3.0, [3.0, 3.0]),
    ],
)
def test_an_on_read_variable_is_saved_as_its_aggregate(
    tmp_path, two, aggregation, value, copies_after
):
    variable = on_read(two, aggregation, [3.0, 4.0])
    saved(tmp_path, {"v": variable})
    assert plainly(tmp_path / "1", "v") == value
    variable.assign(100.0)
    restored(tmp_path, {"v": variable})
    assert copies(variable).tolist() == copies_after


def test_plain_values_and_variables_stand_for_each_other(tmp_path, two):
    saved(tmp_path / "plain", {"v": jnp.float32(7.0)})
    mirrored, total, mean = (
        js.Variable(0.0),
        on_read(two, "sum"),
        on_read(two, "mean"),
    )
    for variable in (mirrored, total, mean):
        restored(tmp_path / "plain", {"v": variable})
    assert mirrored.numpy() == 7.0
    assert copies(total).tolist() == [3.5, 3.5]
    assert copies(mean).tolist() == [7.0, 7.0]
    saved(tmp_path / "sum", {"v": on_read(two, "sum", [1.5, 2.0])})
    assert restored(tmp_path / "sum", {"v": jnp.float32(0)})["v"] == 3.5


def test_an_on_read_variable_without_aggregation_is_refused(tmp_path, two):
    variable = on_read(two, "none", [1.0, 2.0])
    message = "`v`, variable 'Variable', has a copy per replica and aggregation NONE"
    with pytest.raises(ValueError, match=message):
        saved(tmp_path, {"v": variable})
    saved(tmp_path, {"v": 1.0})
    with pytest.raises(ValueError, match=message):
        restored(tmp_path, {"v": variable})
    saved(tmp_path / "copies", {"v": variable.distributed()})
    back = restored(tmp_path / "copies", {"v": variable.distributed()})
    assert [float(x) for x in back["v"].values] == [1.0, 2.0]


def test_versions_of_another_number_of_replicas_are_refused(tmp_path, four, two):
    saved(tmp_path, {"x": four.per_replica([1.0, 2.0, 3.0, 4.0])})
    message = (
        r"`x` is a PerReplica of float32\[\] for 4 replicas in the checkpoint, and a "
        r"PerReplica of float32\[\] for 2 replicas was wanted; versions of single "
        r"replicas mean nothing to another number of them: reduce the value before "
        r"saving"
    )
    with pytest.raises(MismatchError, match=message):
        restored(tmp_path, {"x": two.per_replica([0.0, 0.0])})
    with pytest.raises(MismatchError, match=r"and float32\[4\] was wanted"):
        restored(tmp_path, {"x": jnp.zeros(4)})


def test_versions_on_the_host_stay_there(tmp_path, two):
    saved(tmp_path, {"x": two.per_replica([1.0, 2.0])})
    back = restored(tmp_path, {"x": js.PerReplica(np.zeros(2, np.float32))})["x"]
    assert isinstance(back.stacked, np.ndarray) and back.stacked.tolist() == [1, 2]


def test_a_batch_keeps_the_mask_of_its_rows(tmp_path, two):
    rows = np.arange(6.0, dtype=np.float32)
    dataset = two.experimental_distribute_dataset(js.batches(rows, batch_size=4))
    with iter(dataset) as batches:
        full, last = batches
    saved(tmp_path, {"batch": last})
    back = restored(tmp_path, {"batch": full})["batch"]
    assert np.asarray(back.mask).tolist() == np.asarray(last.mask).tolist()
    assert np.asarray(back.mask).sum() == 2
    total = two.run(lambda batch: js.masked_sum(batch), (back,))
    assert float(two.reduce("sum", total)) == 4.0 + 5.0


class Net(nnx.Module):
    def __init__(self, seed, tied=False):
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        if tied:
            self.layers[1].kernel = self.layers[0].kernel
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(seed))


def arrays_of(tree):
    """The numbers of a state of NNX, by path, on the host."""
    found = jax.tree.leaves_with_path(nnx.state(tree))
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in found
    }


def same(some, others):
    return some.keys() == others.keys() and all(
        np.array_equal(some[name], others[name]) for name in some
    )


def training_objects(seed):
    model = Net(seed)
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param),
        "metrics": nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
        "rngs": nnx.Rngs(seed),
    }


def test_objects_of_nnx_are_restored_in_place(tmp_path, four):
    first, second = training_objects(0), training_objects(5)
    first["metrics"].update(loss=jnp.array([1.0, 2.0]))
    first["rngs"].params()
    before = {name: arrays_of(first[name]) for name in first}
    assert not same(before["model"], arrays_of(second["model"]))
    saved(tmp_path, first)
    owners = dict(second)
    kernel = second["model"].layers[0].kernel
    state = restored(tmp_path, second, four)
    for name in first:
        assert state[name] is owners[name]
        assert same(arrays_of(second[name]), before[name])
    assert second["model"].layers[0].kernel is kernel
    assert kernel.get_raw_value().sharding == four.mirror(1.0).sharding
    assert float(second["metrics"].compute()["loss"]) == 1.5
    assert second["rngs"].params.count[...] == 1


def test_shared_variables_of_an_object_are_written_once_and_stay_shared(tmp_path):
    first, second = Net(0, tied=True), Net(1, tied=True)
    saved(tmp_path, first)
    with manager_of(tmp_path) as manager:
        names = list(manager.record(1).leaves)
    assert "layers/0/kernel" in names and "layers/1/kernel" not in names
    restored(tmp_path, second)
    assert second.layers[1].kernel is second.layers[0].kernel
    assert same(arrays_of(first), arrays_of(second))


def test_a_model_without_numbers_is_restored_into(tmp_path):
    saved(tmp_path, {"model": Net(3)})
    abstract = nnx.eval_shape(lambda: Net(0))
    state = restored(tmp_path, {"model": abstract})
    assert same(arrays_of(state["model"]), arrays_of(Net(3)))


def test_a_train_state_of_linen_is_restored(tmp_path, two):
    params = {"dense": {"kernel": jnp.ones((3, 2))}}
    state = train_state.TrainState.create(
        apply_fn=lambda *_: None, params=params, tx=optax.adam(0.1)
    )
    state = two.mirror(state)
    grads = jax.tree.map(jnp.ones_like, state.params)
    trained = two.run(lambda s, g: s.apply_gradients(grads=g), (state, grads))
    saved(tmp_path, trained)
    # A new one counts its steps with a Python number.
    new = train_state.TrainState.create(
        apply_fn=state.apply_fn, params=params, tx=state.tx
    )
    assert type(new.step) is int
    back = restored(tmp_path, new, two)
    assert type(back) is train_state.TrainState and back.step == 1
    for ours, theirs in zip(
        jax.tree.leaves(back), jax.tree.leaves(trained), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_what_lies_nowhere_yet_is_mirrored_by_the_strategy(tmp_path, four):
    state = {"w": jnp.arange(3.0), "host": np.arange(2), "n": 1}
    with manager_of(tmp_path, four) as manager:
        first, step = manager.restore_or_init(lambda: state)
        assert step == 0
        manager.save(5, first)
        second, step = manager.restore_or_init(lambda: state)
        assert step == 5
    for each in (first, second):
        assert each["w"].sharding == four.mirror(1.0).sharding
        assert isinstance(each["host"], np.ndarray) and type(each["n"]) is int
    with four.scope():
        assert len(restored(tmp_path, state)["w"].devices()) == 4
    alone = restored(tmp_path, state)["w"]
    assert len(alone.devices()) == 1 and not alone.committed


def test_nothing_is_restored_if_an_iterator_refuses(tmp_path, two):
    def passing(first):
        data = list(first + np.arange(8.0, dtype=np.float32).reshape(2, 4))
        return iter(two.experimental_distribute_dataset(data))

    with passing(0) as first, passing(0) as second, passing(9) as third:
        next(first)
        saved(tmp_path, {"a": first, "b": first, "v": 5.0})
        variable = js.Variable(1.0)
        with pytest.raises(ValueError) as raised:
            restored(tmp_path, {"a": second, "b": third, "v": variable})
        assert "`b` was to be restored" in raised.value.__notes__[0]
        with pytest.raises(MismatchError, match="a Python float .*, and an iterator w"):
            restored(tmp_path, {"a": second, "b": third, "v": third})
        assert variable.numpy() == 1.0
        assert np.asarray(next(second).stacked).tolist() == [[0, 1], [2, 3]]
        assert np.asarray(next(third).stacked).tolist() == [[9, 10], [11, 12]]


@pytest.fixture
def simple(tmp_path):
    saved(tmp_path, {"a": jnp.ones((2, 3)), "b": 1, "old": {"c": 2.0}})
    return tmp_path


def test_missing_and_unexpected_values_are_named(simple):
    like = {"a": jnp.zeros((2, 3)), "b": 0, "new": {"x": 1, "y/z": 2}}
    with pytest.raises(MismatchError) as raised:
        restored(simple, like)
    error = raised.value
    assert error.missing == ("new/x", "new/y~1z")
    assert error.unexpected == ("old/c",)
    assert str(error).splitlines() == [
        f"Checkpoint 1 in `{simple}` does not fit what it is restored into:",
        "  missing in the checkpoint: `new/x`",
        "  missing in the checkpoint: `new/y~1z`",
        "  only in the checkpoint: `old/c`",
        "Restore into the structure that was saved, or only what both have: "
        "`restore(..., partial=True)`.",
    ]


def test_a_smaller_state_is_told_what_is_wrong_and_not_what_is_besides(tmp_path):
    moments = {f"m{i}": jnp.ones(2) for i in range(5)}
    saved(tmp_path, {"a": jnp.ones((2, 3)), "b": 1, "optimizer": moments})
    with pytest.raises(MismatchError) as raised:
        restored(tmp_path, {"a": jnp.zeros((3, 2)), "b": 1})
    assert str(raised.value).splitlines()[1:] == [
        "  `a` is float32[2,3] in the checkpoint, and float32[3,2] was wanted",
        "  only in the checkpoint: 5 values",
    ]
    assert len(raised.value.unexpected) == 5
    with pytest.raises(MismatchError) as raised:
        restored(tmp_path, {"a": jnp.zeros((2, 3)), "c": 1})
    assert str(raised.value).splitlines()[1:3] == [
        "  missing in the checkpoint: `c`",
        "  only in the checkpoint: 6 values",
    ]
    with CheckpointManager(tmp_path) as manager, pytest.raises(MismatchError) as raised:
        manager.restore({"a": jnp.zeros((3, 2)), "c": 1}, partial=True)
    assert str(raised.value).splitlines()[1:] == [
        "  `a` is float32[2,3] in the checkpoint, and float32[3,2] was wanted"
    ]


def test_partial_restoring_tells_what_was_left_out(simple):
    with manager_of(simple) as manager:
        assert manager.restored is None
        state = manager.restore(
            {"a": jnp.zeros((2, 3)), "b": 0, "new": 9}, partial=True
        )
        assert state["a"].sum() == 6 and (state["b"], state["new"]) == (1, 9)
        assert manager.restored.missing == ("new",)
        assert manager.restored.unexpected == ("old/c",)
        assert manager.restored.step == 1


@each_of(
    "like, told",
    [
        (jnp.zeros((3, 2)), r"`a` is float32\[2,3\] in the checkpoint, and float32\[3"),
        (jnp.zeros((2, 3), jnp.int32), r"and int32\[2,3\] was wanted"),
        (np.zeros((2, 3)), r"and float64\[2,3\] was wanted"),
        (0.0, "and a Python float was wanted"),
        ("text", "and a string was wanted"),
        (jax.random.key(0), r"and key<fry>\[\] was wanted"),
    ],
)
def test_another_dtype_or_shape_is_an_error(simple, like, told):
    variable = js.Variable(5.0)
    like = {"a": like, "b": 0, "old": {"c": variable}}
    for partial in (False, True):
        with pytest.raises(MismatchError, match=told):
            restored(simple, like, partial=partial)
    assert variable.numpy() == 5.0


@each_of(
    "before, after, expected",
    [
        (3, jnp.int32(0), 3),
        (3, jnp.float32(0), 3.0),
        (jnp.int32(4), 0, 4),
        (jnp.float32(0.5), 1.0, 0.5),
        (1 + 2j, 0j, 1 + 2j),
        (float("inf"), 0.0, float("inf")),
        (2**70, 0, 2**70),
    ],
)
def test_numbers_and_scalars_stand_for_each_other(tmp_path, before, after, expected):
    saved(tmp_path, before)
    back = restored(tmp_path, after)
    assert back == expected
    assert isinstance(back, jax.Array if isinstance(after, jax.Array) else type(after))


@each_of(
    "before, after, told",
    [
        (2.5, jnp.int32(0), "`.` is a Python float in the checkpoint, and int32"),
        (1, True, "is a Python int in the checkpoint, and a Python bool was"),
        (1, "1", "is a Python int in the checkpoint, and a string was wanted"),
        ("1", jnp.int32(1), "is a string in the checkpoint, and int32"),
    ],
)
def test_numbers_do_not_lose_anything(tmp_path, before, after, told):
    saved(tmp_path, before)
    with pytest.raises(MismatchError, match=told):
        restored(tmp_path, after)


@each_of(
    "value, told",
    [
        (object(), "`x` is a object, which a checkpoint cannot hold"),
        (b"1", "`x` is a bytes"),
        (np.array(["a"]), "`x` is an array of <U1"),
        (jax.ShapeDtypeStruct((2,), np.float32), "`x` is the type of an array, a Sh"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, value, told):
    with pytest.raises(TypeError, match=told):
        saved(tmp_path, {"x": value})
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == []


def test_what_cannot_be_saved_or_where_is_told(tmp_path, two):
    state = two.mirror({"w": np.ones(3)})
    step = two.run(lambda s: s, options=js.RunOptions(donate_argnums=(0,)))
    step(state)
    with pytest.raises(
        js.errors.DonatedValueError, match="`w` was donated to an earlier"
    ):
        saved(tmp_path, state)
    once = (np.ones(4, np.float32) for _ in range(3))
    with iter(two.experimental_distribute_dataset(once)) as passing:
        next(passing)
        with pytest.raises(TypeError, match="`data` cannot be saved: "):
            saved(tmp_path, {"data": passing})
    with pytest.raises(ValueError, match="Two values of the state are both called `0`"):
        saved(tmp_path, Twins(1, 2))
    with manager_of(tmp_path) as manager:
        with pytest.raises(
            js.errors.ContextError, match="`save` was called inside a step"
        ):
            two.run(lambda: manager.save(1, {"a": 1}))
        with pytest.raises(
            js.errors.ContextError, match="`restore` was called inside a step"
        ):
            jax.jit(lambda: manager.restore({"a": 1}))()


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Twins:
    """Its children have keys that are the same as text."""

    a: object
    b: object

    def tree_flatten_with_keys(self):
        keys = jax.tree_util.DictKey(0), jax.tree_util.DictKey("0")
        return list(zip(keys, (self.a, self.b), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_the_last_and_the_best_checkpoints_stay(tmp_path):
    scores = [0.1, 0.9, float("nan"), 0.3, 0.9, 0.2, 0.4]
    with manager_of(tmp_path, keep=2, best=("score", "max")) as manager:
        assert manager.best_step() is None and manager.latest_step() is None
        for step, score in enumerate(scores):
            manager.save(step, {"a": step}, metrics={"score": score, "loss": 0})
        manager.wait()
        assert manager.all_steps() == [4, 5, 6]
        assert manager.best_step() == 4 and manager.latest_step() == 6
        assert manager.restore({"a": 0}, manager.best_step()) == {"a": 4}
        assert manager.restored.metrics == {"score": 0.9, "loss": 0.0}
        with pytest.raises(ValueError, match="`metrics` has loss, but the best"):
            manager.save(7, {"a": 7}, metrics={"loss": 1})
    with manager_of(tmp_path, best=("loss", "min"), keep=None) as manager:
        manager.save(7, {"a": 7}, metrics={"loss": -1})
        manager.save(8, {"a": 8})
        manager.wait()
        assert manager.best_step() == 7 and manager.all_steps() == [4, 5, 6, 7, 8]


def test_only_some_steps_are_saved(tmp_path):
    with manager_of(tmp_path, every=5, keep=None) as manager:
        assert [s for s in range(1, 13) if manager.save(s, {"a": s})] == [5, 10]
        assert manager.save(13, {"a": 13}, force=True)
        assert not manager.save(13, {"a": 13}, force=True)
        manager.wait()
        assert manager.all_steps() == [5, 10, 13]


def test_what_a_user_adds_comes_back(tmp_path):
    extra = {"epoch": 3, "names": ["a", None], "nested": {"x": 1.5}}
    with manager_of(tmp_path) as manager:
        manager.save(1, {"a": jnp.ones(2)}, extra=extra, metrics={"m": jnp.float32(2)})
        with pytest.raises(TypeError, match="`extra` was .* which JSON cannot say"):
            manager.save(2, {"a": 1}, extra={1, 2})
        manager.restore({"a": jnp.ones(2)})
        assert manager.restored.extra == extra
        record = manager.record(1)
        assert record.extra == extra and record.metrics == {"m": 2.0}
        assert record.leaves["a"] == {"kind": "array", "dtype": "float32", "shape": [2]}
        with pytest.raises(ValueError, match="was not told what is best"):
            manager.best_step()


def test_a_later_checkpoint_of_another_training_is_not_mixed_up(tmp_path):
    saved(tmp_path, {"a": 1}, step=10)
    saved(tmp_path, {"a": 2}, step=20)
    with manager_of(tmp_path) as manager:
        for step in (5, 20):
            with pytest.raises(ValueError, match="has checkpoint 20 already, of ano"):
                manager.save(step, {"a": 3})
        manager.delete(20)
        assert manager.restore_or_init({"a": 0}) == ({"a": 1}, 10)
        assert not manager.save(10, {"a": 3})
        assert manager.save(11, {"a": 3})
    assert restored(tmp_path, {"a": 0}) == {"a": 3}


def test_absent_checkpoints_are_an_error(tmp_path):
    with manager_of(tmp_path / "none") as manager:
        with pytest.raises(FileNotFoundError, match="There is no checkpoint in "):
            manager.restore({"a": 1})
        with pytest.raises(FileNotFoundError, match="no checkpoint 3 in .*: none"):
            manager.restore({"a": 1}, 3)
        assert manager.restore_or_init({"a": 1}) == ({"a": 1}, 0)
        assert not (tmp_path / "none").exists()
        manager.save(2, {"a": 1})
        manager.wait()
        for method in (manager.delete, manager.record):
            with pytest.raises(FileNotFoundError, match="checkpoint 3 in .*it has: 2"):
                method(3)


@each_of(
    "kwargs, told",
    [
        ({"keep": 0}, "`keep` was 0; at least 1 was wanted"),
        ({"every": 0}, "`every` was 0"),
        ({"best": "loss"}, "`best` was 'loss'; the name of a metric and 'max' or"),
        ({"best": ("loss", "least")}, "`best` was"),
    ],
)
def test_wrong_choices_are_errors(tmp_path, kwargs, told):
    with pytest.raises(ValueError, match=told):
        manager_of(tmp_path, **kwargs)


def test_a_state_may_be_callable(tmp_path):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self):
            raise AssertionError("it was called")

    model = Model()
    with manager_of(tmp_path) as manager:
        assert manager.restore_or_init(model) == (model, 0)
        manager.save(1, model)
        assert manager.restore_or_init(lambda: model) == (model, 1)


@each_of("donated", [False, True])
def test_the_state_may_be_changed_while_it_is_saved(tmp_path, four, donated):
    state = four.mirror({"w": np.zeros((512, 512), np.float32)})
    host = np.zeros(100_000)
    options = js.RunOptions(donate_argnums=(0,)) if donated else None
    with four.scope():
        variable = js.Variable(jnp.zeros((256, 256)))

    @four.run(options=options)
    def step(state):
        variable.assign_add(jnp.ones((256, 256)))
        return {"w": state["w"] + 1}

    state = step(state)
    with manager_of(tmp_path, keep=None) as manager:
        for n in range(1, 5):
            manager.save(n, {"s": state, "host": host, "v": variable})
            state = step(state)
            host += 1
    for n in range(1, 5):
        like = {"s": state, "host": host, "v": variable}
        back = restored(tmp_path, like, step=n)
        assert np.all(np.asarray(back["s"]["w"]) == n)
        assert np.all(back["host"] == n - 1) and np.all(variable.numpy() == n)


def test_a_loop_of_asyncio_may_run_as_in_a_notebook(tmp_path):
    async def cell():
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"w": np.arange(3.0)})
            manager.wait()
            return manager.restore({"w": np.zeros(3)})["w"]

    np.testing.assert_array_equal(asyncio.run(cell()), [0, 1, 2])


def test_plain_orbax_reads_the_arrays(tmp_path, two):
    parts = js.MirroredStrategy(
        jax.devices()[:4], sharding=js.StateSharding("state", min_bytes=0)
    )
    divided = parts.mirror(np.arange(16.0))
    assert isinstance(divided, js.Sharded)
    saved(tmp_path, {"params": {"w": two.mirror(np.arange(3.0)), "parts": divided}})
    np.testing.assert_array_equal(plainly(tmp_path / "1", "params/w"), np.arange(3))
    found = plainly(tmp_path / "1", "params/parts")
    np.testing.assert_array_equal(found, np.arange(16))


def test_arrays_are_not_compressed(tmp_path, two):
    """Of trained numbers that saves nothing, and takes most of the time."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": two.mirror(np.zeros(2**18, np.float32))})
        manager.wait()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 2**20


@pytest.mark.slow
def test_a_manager_may_be_made_before_jax_looks_for_devices(tmp_path):
    code = f"""
import sys
import jax
from jaxstrategy.checkpoint import CheckpointManager
manager = CheckpointManager({str(tmp_path)!r})
jax.config.update("jax_num_cpu_devices", 3)  # an error once there are devices
sys.exit(len(jax.devices()))
"""
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=120)
    assert done.returncode == 3
