"""An optimizer as TensorFlow 1 has them: slots, non-slot variables, `merge_call`."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import slow
from helpers.first_generation import central, mirrored, one, replica_id, sharded

import jaxstrategy as js
from jaxstrategy.compat import v1

RATE, BETA1, BETA2, EPSILON = 0.1, 0.9, 0.999, 1e-8


class Adam:
    """`apply_gradients` as `tf.compat.v1.train.AdamOptimizer` does it."""

    def __init__(self):
        self.slots = {}
        self.powers = None

    def apply_gradients(self, grads_and_vars):
        context = v1.get_replica_context()
        return context.merge_call(self._distributed_apply, args=(grads_and_vars,))

    def _create(self, distribution, variables):
        place = distribution.extended.non_slot_devices(variables)
        with distribution.extended.colocate_vars_with(place):
            self.powers = js.Variable(BETA1), js.Variable(BETA2)
        for v in variables:
            with distribution.extended.colocate_vars_with(v):
                self.slots[v] = tuple(
                    js.Variable(np.zeros(v.shape, "float32"), trainable=False)
                    for _ in range(2)
                )

    def _distributed_apply(self, distribution, grads_and_vars):
        extended = distribution.extended
        variables = [v for _, v in grads_and_vars]
        if self.powers is None:
            self._create(distribution, variables)
        reduced = extended.batch_reduce_to(v1.ReduceOp.SUM, grads_and_vars)
        updates = []
        for g, v in zip(reduced, variables, strict=True):
            updates.extend(extended.update(v, self._update, args=(g,), group=False))
        place = extended.non_slot_devices(variables)
        extended.update_non_slot(place, self._finish, args=(updates,), group=False)
        return distribution.group(updates)

    def _update(self, v, g):
        mean, square = self.slots[v]
        mean.assign(BETA1 * mean + (1 - BETA1) * g)
        square.assign(BETA2 * square + (1 - BETA2) * g * g)
        power1, power2 = (power.value() for power in self.powers)
        rate = RATE * jnp.sqrt(1 - power2) / (1 - power1)
        return v.assign_sub(rate * mean.value() / (jnp.sqrt(square.value()) + EPSILON))

    def _finish(self, _):
        for power, beta in zip(self.powers, (BETA1, BETA2), strict=True):
            power.assign(power * beta)


def expected(n, steps):
    """Weights and bias after so many steps of `n` replicas."""
    values, means, squares = [[np.zeros(3), 0.0] for _ in range(3)]
    power1, power2 = BETA1, BETA2
    for _ in range(steps):
        gradients = [np.zeros(3), 0.0]
        for i in range(n):
            x = np.arange(3.0) + i
            error = x @ values[0] + values[1] - 1
            gradients = [gradients[0] + 2 * error * x, gradients[1] + 2 * error]
        rate = RATE * np.sqrt(1 - power2) / (1 - power1)
        for k, g in enumerate(gradients):
            means[k] = BETA1 * means[k] + (1 - BETA1) * g
            squares[k] = BETA2 * squares[k] + (1 - BETA2) * g * g
            values[k] = values[k] - rate * means[k] / (np.sqrt(squares[k]) + EPSILON)
        power1, power2 = power1 * BETA1, power2 * BETA2
    return values


def trained(s, steps):
    """The optimizer, weights and bias after so many steps."""
    with s.scope():
        w = js.Variable(np.zeros(3, "float32"), name="w")
        b = js.Variable(0.0, name="b")
    optimizer = Adam()

    def step():
        x = jnp.arange(3.0) + replica_id()

        def loss():
            return (jnp.vdot(x, w.value()) + b - 1.0) ** 2

        gradients = js.grad(loss, [w, b])()
        optimizer.apply_gradients(list(zip(gradients, (w, b), strict=True)))

    for _ in range(steps):
        s.extended.call_for_each_replica(step)
    return optimizer, w, b


def check(s, w, b, steps):
    weights, bias = expected(s.num_replicas_in_sync, steps)
    np.testing.assert_allclose(s.extended.read_var(w), weights, rtol=2e-5)
    np.testing.assert_allclose(s.extended.read_var(b), bias, rtol=2e-5)


@pytest.mark.parametrize(
    "make", [mirrored, v1.get_strategy, *slow(one, central, sharded)]
)
def test_it_trains_as_numpy_does(make):
    s = make()
    optimizer, w, b = trained(s, 3)
    check(s, w, b, 3)
    for v in (w, b):
        assert all(slot.devices == v.devices for slot in optimizer.slots[v])
    steps = np.log(float(optimizer.powers[0])) / np.log(BETA1)
    assert steps == pytest.approx(4, rel=1e-5)
