"""Operations of eager replicas are compiled once for all calls, and keep nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

# A replica is late when the machine is busy, whatever it does.
pytestmark = pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")


def all_reduced(x):
    return js.get_replica_context().all_reduce("sum", x)


def test_a_second_call_compiles_nothing(two, compilations):
    with two.scope():
        w = js.Variable(2.0)

    def step(x):
        grad = js.grad(lambda: jnp.sum((w * x - 1.0) ** 2), w)()
        w.assign_sub(0.1 * all_reduced(grad))
        return jnp.tanh(x) * w

    x = two.per_replica(np.float32([[1.0, 2.0], [3.0, 4.0]]))
    with js.experimental.eager_replicas():
        two.run(step, (x,))
        first = float(w)
        compilations()
        two.run(step, (x,))
        assert compilations() == 0
    # A plain loop: the derivative is 2 * sum((w x - 1) x) of all rows.
    rows, expected = np.arange(1.0, 5.0), 2.0
    for found in (first, float(w)):
        expected -= 0.1 * 2 * np.sum((expected * rows - 1.0) * rows)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@each_of("on_each_device", (1, 2))
def test_a_helper_that_stays_compiled_knows_its_replica(on_each_device):
    two = js.MirroredStrategy(
        jax.devices()[: 2 // on_each_device], replicas_per_device=on_each_device
    )
    helper = jax.jit(lambda x: x + js.get_replica_context().replica_id_in_sync_group)
    with js.experimental.eager_replicas(disable_jit=False):
        for start in (1.0, 5.0):
            found = two.run(lambda x: all_reduced(helper(x)), (np.float32(start),))
            assert found == 2 * start + 1


@each_of("traced, disable_jit", ((jax.checkpoint, True), (jax.jit, False)))
def test_what_would_be_kept_for_later_calls_is_refused(two, traced, disable_jit):
    with two.scope():
        v = js.Variable(3.0, name="v")
    helper = traced(lambda x: v * x)
    given = traced(lambda v, x: v * x)
    with js.experimental.eager_replicas(disable_jit=disable_jit):
        with pytest.raises(js.errors.ContextError, match="'v' was used.*would keep it"):
            two.run(lambda: helper(2.0))
        for value in (3.0, 4.0):
            v.assign(value)
            assert two.run(lambda: given(v.value(), 2.0)) == 2 * value


def test_masks_would_be_kept_for_later_calls(two):
    helper = jax.checkpoint(js.masked_sum)
    batches = two.experimental_distribute_dataset(js.batches(np.arange(3.0), 4))
    with js.experimental.eager_replicas():
        for batch in batches:
            with pytest.raises(
                js.errors.ContextError, match="mask of a batch was used, in"
            ):
                two.run(lambda x: all_reduced(helper(x)), (batch,))
            assert two.run(lambda x: all_reduced(js.masked_sum(x)), (batch,)) == 3.0
