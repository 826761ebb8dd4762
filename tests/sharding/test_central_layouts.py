"""`CentralStorageStrategy` with replicas of several devices, or that share one."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import each_of

import jaxstrategy as js


@each_of(
    "devices, layout",
    [(8, {"logical_axes": {"core": 2}}), (1, {"replicas_per_device": 4})],
)
@each_of("home", ["CPU:0", "CPU:7"])
def test_variables_stay_on_their_device_and_steps_change_them(devices, layout, home):
    strategy = js.experimental.CentralStorageStrategy(
        jax.devices()[:devices], home, **layout
    )
    assert strategy.num_replicas_in_sync == 4
    w = first = np.arange(6, dtype=np.float32).reshape(3, 2)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    with strategy.scope():
        variable = js.Variable(first, aggregation="mean")
        seen = js.Variable(0.0, synchronization="on_read", aggregation="sum")

    @strategy.run
    def step(x):
        seen.assign_add((x @ variable.value()).sum())
        variable.assign_add(jnp.outer(x, jnp.ones(2)))
        return js.get_replica_context().all_reduce("max", x)

    wanted = 0.0
    for _ in range(2):
        np.testing.assert_array_equal(step(strategy.per_replica(x)), x.max(0))
        wanted += (x @ w).sum()
        w = w + np.outer(x.mean(0), np.ones(2))
    np.testing.assert_allclose(variable.numpy(), w, rtol=1e-5)
    np.testing.assert_allclose(seen.numpy(), wanted, rtol=1e-5)
    assert {d.id for d in variable.value().devices()} == {int(home[-1])}
    strategy.assert_in_sync(variable)
