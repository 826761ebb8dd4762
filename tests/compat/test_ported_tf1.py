"""A training program of TensorFlow 1 as its users wrote them, against plain NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.compat import v1 as distribute

ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
TARGETS = (ROWS @ [1.0, 2.0, 3.0] + 0.5).astype(np.float32)


class Model:
    """Linear regression with a moving mean of its inputs, and a count of steps."""

    def __init__(self):
        self.w = distribute.get_variable("w", initializer=np.zeros(3, np.float32))
        self.b = distribute.get_variable("b", initializer=0.0)
        self.mean = distribute.get_variable(
            "moving_mean",
            initializer=np.zeros(3, np.float32),
            trainable=False,
            synchronization=js.VariableSynchronization.ON_READ,
            aggregation=js.VariableAggregation.MEAN,
        )
        self.step = distribute.get_variable(
            "global_step",
            initializer=0,
            trainable=False,
            aggregation=js.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def variables(self):
        return {"w": self.w, "b": self.b, "mean": self.mean, "step": self.step}

    def train(self, x, y):
        """One step of one replica; returns its part of the loss of all."""
        replica = distribute.get_replica_context()

        def loss_fn():
            errors = x @ self.w + self.b - y
            return jnp.mean(errors**2) / replica.num_replicas_in_sync

        loss, gradients = js.value_and_grad(loss_fn, [self.w, self.b])()
        replica.merge_call(self.apply, args=(gradients,))
        self.mean.assign_sub(0.1 * (self.mean - x.mean(0)))
        self.step.assign_add(1)
        return loss

    def apply(self, strategy, gradients):
        variables = [self.w, self.b]
        extended = strategy.extended
        reduced = extended.batch_reduce_to(
            distribute.ReduceOp.SUM, list(zip(gradients, variables, strict=True))
        )
        for v, g in zip(variables, reduced, strict=True):
            extended.update(v, lambda v, g: v.assign_sub(0.1 * g), args=(g,))


def plain(batches):
    """Losses, and the parameters and moving mean behind them, without devices."""
    at, mean, losses = np.zeros(4), np.zeros(3), []
    for start in batches:
        own = slice(start, start + 8)
        x = np.c_[ROWS[own], np.ones(8)]
        errors = x @ at - TARGETS[own]
        losses.append((errors**2).mean())
        at = at - 0.1 * 2 * x.T @ errors / 8
        mean = 0.9 * mean + 0.1 * ROWS[own].mean(0)
    return losses, at, mean


def check(model, strategy, found, batches):
    losses, at, mean = plain(batches)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    read = strategy.extended.read_var
    np.testing.assert_allclose(read(model.w), at[:3], rtol=1e-5)
    np.testing.assert_allclose(read(model.b), at[3], rtol=1e-4)
    np.testing.assert_allclose(read(model.mean), mean, rtol=1e-4, atol=1e-7)
    assert int(read(model.step)) == len(batches)


@pytest.fixture
def strategy():
    return distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])


def test_batches_one_by_one_until_the_data_end(strategy, compilations):
    with strategy.scope():
        model = Model()
        rows = strategy.experimental_make_numpy_dataset((ROWS, TARGETS))
        iterator = strategy.make_dataset_iterator(rows.batch(8))
    losses, compiled = [], []
    for _ in range(2):
        assert strategy.extended.should_save_summary
        iterator.initialize()
        while True:

            def step_fn(inputs):  # made anew for each batch, as in the tutorials
                return model.train(*inputs)

            try:
                each = strategy.experimental_run(step_fn, iterator)
            except js.OutOfRangeError as error:
                assert "Call `iterator.initialize()` for another pass" in str(error)
                break
            losses.append(float(strategy.reduce(distribute.ReduceOp.SUM, each)))
            compiled.append(compilations())
    assert compiled[0] and not any(compiled[1:])
    check(model, strategy, losses, [0, 8, 0, 8])


def test_several_steps_a_call_with_checkpoints(strategy, compilations, tmp_path):
    extended = strategy.extended
    with strategy.scope():
        model = Model()

    def input_fn(context):
        # Each replica takes its half of the eight rows, one element after the other.
        return [(ROWS[i : i + 4], TARGETS[i : i + 4]) for i in range(0, 16, 4)]

    iterator = strategy.make_input_fn_iterator(input_fn)

    def replica_fn(context, x, y):
        loss = model.train(x, y)
        context.set_last_step_output("loss", loss, distribute.ReduceOp.SUM)

    losses, compiled = [], []
    for _ in range(3):
        iterator.initialize()
        context = extended.experimental_run_steps_on_iterator(
            lambda context, inputs: extended.call_for_each_replica(
                replica_fn, args=(context, *inputs)
            ),
            iterator,
            iterations=2,
            initial_loop_values={"loss": jnp.float32(0)},
        )
        losses.append(float(context.last_step_outputs["loss"]))
        compiled.append(compilations())
    assert compiled[0] and not any(compiled[2:])
    batches = [0, 8] * 3
    shown = plain(batches)[0]
    shown[1::2] = losses  # of the last step of each call
    check(model, strategy, shown, batches)

    assert extended.should_checkpoint
    with js.checkpoint.CheckpointManager(tmp_path, strategy) as manager:
        manager.save(int(extended.read_var(model.step)), model.variables())
    other = distribute.OneDeviceStrategy("/cpu:2")
    with other.scope():
        restored = Model()
    with js.checkpoint.CheckpointManager(tmp_path, other) as manager:
        manager.restore(restored.variables())
    check(restored, other, shown, batches)
