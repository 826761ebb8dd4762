"""Elements for towers, several steps over them, and steps with one loss, as in 2018."""

import re

import jax
import numpy as np
import optax
import pytest
from helpers.towers import mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib

SUM, MEAN = contrib.VariableAggregation.SUM, contrib.VariableAggregation.MEAN


def all_of(d, iterator):
    with d.scope():
        return [unwrapped(d, element) for element in iterator]


def test_one_element_for_each_tower():
    d = mirrored(2)
    for count, steps in [(10, 5), (5, 2), (1, 0)]:
        dataset = d.distribute_dataset(lambda count=count: range(count))
        assert isinstance(dataset, contrib.PerDeviceDataset)
        iterator = dataset.make_one_shot_iterator()
        assert all_of(d, iterator) == np.arange(2 * steps).reshape(steps, 2).tolist()
        for _ in range(2):
            with pytest.raises(js.OutOfRangeError):
                iterator.get_next()


def test_what_is_no_dataset():
    text = (
        "dataset_fn() must return a tf.data.Dataset when using a DistributionStrategy"
    )
    for returned in [3, None, {"x": np.ones(3)}, np.ones(3)]:
        with pytest.raises(ValueError, match=re.escape(text)):
            mirrored(2).distribute_dataset(lambda returned=returned: returned)


def elements(d, dataset_fn=lambda: range(1000)):
    return d.distribute_dataset(dataset_fn).make_one_shot_iterator()


@pytest.mark.parametrize("in_tower", [False, True])
def test_outputs_of_the_last_step(in_tower):
    d = mirrored(2)

    def in_each(context, x):
        context.set_last_step_output("sum", x, aggregation=SUM)
        context.set_last_step_output("mean", x, aggregation=MEAN)
        return x

    def fn(context, x):
        if in_tower:
            x = d.call_for_each_tower(in_each, context, x)
        else:
            in_each(context, x)
        context.set_last_step_output("none", x)

    with d.scope():
        context = d.run_steps_on_dataset(fn, elements(d), iterations=3)
        found = context.last_step_outputs
        assert (float(found["sum"]), float(found["mean"])) == (9, 4.5)
        assert unwrapped(d, found["none"]) == [4, 5]
    assert isinstance(context, contrib.MultiStepContext) and context.run_op is None


def test_aggregations_without_meaning():
    d = mirrored(2)
    for aggregation, text in [
        (
            contrib.VariableAggregation.NONE,
            "The output 'x' was set in a replica context without saying how the "
            "replicas' values are reduced. Give `aggregation=VariableAggregation.MEAN`",
        ),
        (contrib.VariableAggregation.ONLY_FIRST_REPLICA, "VariableAggregation.SUM` or"),
    ]:

        def step(context, x, aggregation=aggregation):
            context.set_last_step_output("x", x, aggregation)

        with d.scope(), pytest.raises(ValueError, match=re.escape(text)):
            d.run_steps_on_dataset(
                lambda context, x, step=step: d.call_for_each_tower(step, context, x),
                elements(d),
            )


# Steps that train a model with one loss.


def variable(d, value=0.0, **options):
    with d.scope():
        return js.Variable(value, **options)


def ones():
    return [np.float32([1])] * 60


@pytest.mark.parametrize(
    "name, iterations, wanted",
    [("mirrored-2", 2, [0.36, 0.5904, 0.737856]), ("default", 1, [0.1, 0.19, 0.271])],
)
def test_gradients_are_summed(name, iterations, wanted):
    d = contrib.get_distribution_strategy() if name == "default" else mirrored(2)
    w = variable(d)

    def loss_fn(context, x):
        loss = ((w * x - 1) ** 2).sum()
        context.set_last_step_output("loss", loss, MEAN)
        return loss

    step = contrib.StandardSingleLossStep(ones, loss_fn, optax.sgd(0.05), d, iterations)
    assert step.initialize() == [] and step.last_context is None
    found, losses, before = [], [], []
    for _ in range(3):
        assert step() is None
        found.append(float(w))
        losses.append(float(step.last_context.last_step_outputs["loss"]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    if iterations == 1:  # of the value before the update
        before = [0, *wanted[:-1]]
        np.testing.assert_allclose(losses, (np.array(before) - 1) ** 2, rtol=1e-5)
    assert step.distribution is d


def test_the_state_of_the_optimizer_is_kept():
    d = mirrored(2)
    w = variable(d, np.zeros(2, np.float32), aggregation="sum")
    unused = variable(d, 5.0)
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1))
    rows = np.random.default_rng(0).normal(size=(8, 3, 2)).astype(np.float32)
    traces = []

    def count():
        traces.append(1)

    def loss_fn(context, x):
        count()
        return ((x @ w - 1) ** 2).sum()

    step = contrib.StandardSingleLossStep(lambda: [*rows], loss_fn, optimizer, d)
    for _ in range(4):
        step()
    # The whole batch on one device, by Optax alone.
    at = np.zeros(2, np.float32)
    state = optimizer.init(at)
    for start in range(0, 8, 2):
        x = rows[start : start + 2].reshape(-1, 2)
        grad = jax.grad(lambda w, x=x: ((x @ w - 1) ** 2).sum())(at)
        change, state = optimizer.update(grad, state, at)
        at = at + change
    np.testing.assert_allclose(np.asarray(w.value()), at, rtol=1e-4)
    assert float(unused) == 5  # its weight does not decay
    assert len(traces) <= 2  # with a state, and before there was one
    with pytest.raises(js.OutOfRangeError):
        step()
    step.initialize()
    step()


def test_a_step_of_ones_own():
    class Batch(contrib.StandardInputStep):
        def __call__(self):
            with self.distribution.scope():
                return self.distribution.unwrap(self.next_element())

    step = Batch(lambda: range(4), mirrored(2))
    assert [int(x) for x in step()] == [0, 1]
    assert step.initialize() == []
    assert [int(x) for x in step()] == [0, 1]
    with pytest.raises(TypeError, match="abstract"):
        contrib.Step(mirrored(2))


def test_arguments_of_other_kinds():
    for changed, error, text in [
        ({"loss_fn": 3}, TypeError, "`loss_fn` was 3; a function of a context"),
        ({"optimizer": "sgd"}, TypeError, "`optimizer` was 'sgd'; an optimizer of"),
        ({"iterations_per_step": 0}, ValueError, "`iterations_per_step` was 0; 1 or"),
        ({"iterations_per_step": 1.5}, TypeError, "`iterations_per_step` was 1.5; a w"),
        ({"distribution": js.get_strategy()}, TypeError, "`distribution` was"),
        ({"dataset_fn": [1]}, TypeError, "`distribute_dataset` was given [1]; a"),
    ]:
        given = {
            "dataset_fn": ones,
            "loss_fn": lambda context, x: x.sum(),
            "optimizer": optax.sgd(0.1),
            "distribution": mirrored(2),
        }
        with pytest.raises(error, match=re.escape(text)):
            contrib.StandardSingleLossStep(**(given | changed))
