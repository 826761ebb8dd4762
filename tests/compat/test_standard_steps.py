"""Steps of 2018 that train a model with one loss."""

import re

import jax
import numpy as np
import optax
import pytest
from helpers.towers import mirrored

import jaxstrategy as js
from jaxstrategy.compat import contrib


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
        context.set_last_step_output("loss", loss, contrib.VariableAggregation.MEAN)
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
