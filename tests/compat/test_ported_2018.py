"""A program of 2018 with an optimizer of its own, Adam, against one in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.compat import contrib as distribute

RNG = np.random.default_rng(1)
ROWS = RNG.normal(size=(24, 3)).astype(np.float32)
TARGETS = (ROWS @ [1.0, 2.0, 3.0] + 0.5).astype(np.float32)
RATE, BETA1, BETA2, EPSILON = 0.1, 0.9, 0.99, 1e-7


class Adam:
    """As `tf.train.AdamOptimizer` of TensorFlow 1.10 is written."""

    def __init__(self, distribution, variables):
        self.slots = {}
        with distribution.colocate_vars_with(variables[0]):
            self.powers = [
                js.Variable(beta, trainable=False, name=f"beta{i}_power")
                for i, beta in enumerate((BETA1, BETA2), 1)
            ]
        for v in variables:
            with distribution.colocate_vars_with(v):
                self.slots[v.name] = [
                    distribute.get_variable(
                        f"{v.name}/{slot}",
                        initializer=np.zeros(v.shape, np.float32),
                        trainable=False,
                    )
                    for slot in ("m", "v")
                ]

    def apply_gradients(self, grads_and_vars, global_step):
        context = distribute.get_tower_context()
        return context.merge_call(self.distributed_apply, grads_and_vars, global_step)

    def distributed_apply(self, distribution, grads_and_vars, global_step):
        reduced = distribution.batch_reduce(
            distribute.VariableAggregation.SUM, grads_and_vars
        )
        variables = [v for _, v in grads_and_vars]
        for v, g in zip(variables, reduced, strict=True):
            distribution.update(v, self.apply_dense, g)
        devices = distribution.non_slot_devices(variables)
        distribution.update_non_slot(devices, self.finish)
        distribution.update(global_step, lambda v: v.assign_add(1))

    def apply_dense(self, var, g):
        m, v = self.slots[var.name]
        power1, power2 = self.powers
        m.assign(BETA1 * m + (1 - BETA1) * g)
        v.assign(BETA2 * v + (1 - BETA2) * g * g)
        rate = RATE * jnp.sqrt(1 - power2) / (1 - power1)
        var.assign_sub(rate * m / (jnp.sqrt(v) + EPSILON))

    def finish(self):
        for power, beta in zip(self.powers, (BETA1, BETA2), strict=True):
            power.assign(power * beta)


def plain(steps, rows):
    """Losses and parameters of Adam in float64."""
    at, m, v, losses = np.zeros(4), np.zeros(4), np.zeros(4), []
    for step in range(steps):
        own = slice(step * rows, (step + 1) * rows)
        x = np.c_[ROWS[own], np.ones(rows)]
        errors = x @ at - TARGETS[own]
        losses.append((errors**2).mean())
        g = 2 * x.T @ errors / rows
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        powers = BETA1 ** (step + 1), BETA2 ** (step + 1)
        rate = RATE * np.sqrt(1 - powers[1]) / (1 - powers[0])
        at = at - rate * m / (np.sqrt(v) + EPSILON)
    return losses, at


def dataset():
    return [(ROWS[i : i + 4], TARGETS[i : i + 4]) for i in range(0, 24, 4)]


@pytest.mark.parametrize("towers, at_once", [(1, False), (2, True)])
def test_training_with_slots_and_others(towers, at_once, compilations):
    distribution = distribute.MirroredStrategy(num_gpus=towers)
    with distribution.scope():
        w = distribute.get_variable("w", initializer=np.zeros(3, np.float32))
        b = distribute.get_variable("b", initializer=0.0)
        # One that towers sum, as `increment_var` wants it.
        seen = js.Variable(0, aggregation=distribute.VariableAggregation.SUM)
        steps = js.Variable(0, trainable=False, name="global_step")
        optimizer = Adam(distribution, [w, b])
        data = distribution.distribute_dataset(dataset)
        iterator = data.make_one_shot_iterator()

    def tower_fn(x, y):
        context = distribute.get_tower_context()

        def loss_fn():
            return jnp.mean((x @ w + b - y) ** 2) / context.num_towers

        loss, gradients = js.value_and_grad(loss_fn, [w, b])()
        optimizer.apply_gradients(list(zip(gradients, [w, b], strict=True)), steps)
        seen.assign_add(x.shape[0])
        return loss

    def step_fn(context, x, y):
        loss = distribution.call_for_each_tower(tower_fn, x, y)
        loss = distribution.reduce("sum", loss, None)
        context.set_last_step_output("loss", loss)

    losses, compiled = [], []
    with distribution.scope():
        for _ in range(3):
            if at_once:
                context = distribution.run_steps_on_dataset(step_fn, iterator, 1)
                losses.append(float(context.last_step_outputs["loss"]))
            else:
                each = distribution.call_for_each_tower(
                    tower_fn, *iterator.get_next(), run_concurrently=False
                )
                losses.append(sum(float(x) for x in distribution.unwrap(each)))
            compiled.append(compilations())
        found = [*distribution.read_var(w), distribution.read_var(b)]
    assert compiled[0] and compiled[2] == 0
    wanted, at = plain(3, 4 * towers)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(found, at, rtol=1e-4)
    np.testing.assert_allclose(
        [float(power) for power in optimizer.powers], [BETA1**4, BETA2**4], rtol=1e-6
    )
    assert int(steps) == 3 and int(seen) == 3 * 4 * towers
