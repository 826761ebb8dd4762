"""`jax.checking_leaks` is silent of what steps use, and not of what they leave.

Each is called for the first time, so that it is traced while JAX looks.
"""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each
from helpers.clusters import coordinated
from helpers.cores import cored
from helpers.replicas import replica
from helpers.variables import variable
from jax import lax
from jax.experimental import io_callback

import jaxstrategy as js

START = np.linspace(-1, 1, 8, dtype=np.float32)
DIVIDED = js.StateSharding("state", min_bytes=0)


def mirrored(count=2, **options):
    return js.MirroredStrategy(jax.devices()[:count], **options)


STRATEGIES = {
    "one replica": lambda: mirrored(1),
    "replicas": mirrored,
    "on shared devices": lambda: mirrored(replicas_per_device=2),
    "of several devices": lambda: cored(2, 2),
    "divided on shared devices": lambda: mirrored(
        sharding=DIVIDED, replicas_per_device=2
    ),
}


class Variables:
    def __init__(self, strategy):
        self.shared = variable(strategy, START, aggregation="mean")
        self.own = variable(strategy, np.zeros(8, np.float32), "on_read", "sum")
        self.unused = variable(strategy, START)
        self.scaled = jax.jit(lambda x: self.shared * x)


@pytest.fixture
def of_two(two):
    return Variables(two)


def use_variables(strategy):
    v = Variables(strategy)

    def step(x):
        v.own.assign_add(v.shared * x)
        v.shared.assign_add(v.shared * x)
        return v.shared + x

    with jax.checking_leaks():
        found = strategy.run(step, (2.0,))
    for own in strategy.experimental_local_results(found):
        np.testing.assert_allclose(own, 3 * START + 2, rtol=1e-6)
    np.testing.assert_allclose(v.shared.numpy(), 3 * START, rtol=1e-6)
    total = 2 * strategy.num_replicas_in_sync * START
    np.testing.assert_allclose(v.own.numpy(), total, rtol=1e-6)


def test_steps_that_use_variables():
    for _, make in each(STRATEGIES):
        use_variables(make())


def in_jit(v, x):
    return v.scaled(x)


def in_scan(v, x):
    def turn(carry, _):
        v.own.assign_add(v.shared)
        return carry + v.shared, None

    return lax.scan(turn, jnp.zeros(8), length=2)[0] / 2 * x


def in_while_loop(v, x):
    def turn(carry):
        return carry[0] + 1, carry[1] + v.shared

    return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, jnp.zeros(8)))[1]


def in_cond(v, x):
    return lax.cond(x > 1, lambda: v.shared * x, lambda: v.shared + x)


def in_gradient(v, x):
    return js.grad(lambda: (v.shared**2 / 2 * x).sum(), v.shared)()


def in_merge_call(v, x):
    def merged(strategy, x):
        v.shared.assign_add(v.shared * 0)
        return v.scaled(strategy.reduce("mean", x))

    return replica().merge_call(merged, (x,))


def in_callback(v, x):
    read = functools.partial(io_callback, lambda value: value + 0, v.shared)
    return read(v.shared.value()) * x


IN_STEPS = [
    in_jit, in_scan, in_while_loop, in_cond, in_gradient, in_merge_call, in_callback
]  # fmt: skip


@pytest.mark.slow
def test_what_a_step_has_inside(two, of_two):
    with jax.checking_leaks():
        for use in each(IN_STEPS):
            found = two.run(functools.partial(use, of_two), (2.0,))
            for own in two.experimental_local_results(found):
                np.testing.assert_allclose(own, 2 * START, rtol=1e-6)


def test_a_callback_beside_several_devices_of_a_replica_is_refused():
    strategy = STRATEGIES["of several devices"]()
    v = Variables(strategy)
    with jax.checking_leaks(), pytest.raises(NotImplementedError, match="calls the ho"):
        strategy.run(lambda x: in_callback(v, x), (2.0,))


def read_and_add(v):
    def step(x):
        v.own.assign_add(v.shared * x)
        return v.scaled(replica().all_reduce("mean", x))

    return step


def in_scan_around(strategy, v, x):
    step = read_and_add(v)
    return lax.scan(lambda x, _: (x, strategy.run(step, (x,))), x, length=2)[1][0]


def of_gradient(strategy, v, x):
    step = read_and_add(v)
    return START * jax.grad(lambda x: strategy.run(step, (x,))[-1])(x) * x


def of_several(strategy, v, x):
    step = strategy.several(lambda _, x: (None, read_and_add(v)(x)))
    return step(None, [x, x])[1][0]


def of_local_steps(strategy, v, x):
    mean = jax.jit(lambda x: replica().all_reduce("mean", v.scaled(x)))
    steps = strategy.local_steps(lambda w, x: (w, mean(x)))
    return steps(jnp.zeros(2), [x, x])[1][0]


@pytest.mark.slow
def test_what_is_around_a_step(two, of_two):
    for call in each([in_scan_around, of_gradient, of_several, of_local_steps]):
        with jax.checking_leaks():
            found = call(two, of_two, jnp.float32(2))
        np.testing.assert_allclose(found, 2 * START, rtol=1e-6)


@pytest.fixture
def all_threads():
    """JAX looks in all of them, as with `JAX_CHECK_TRACER_LEAKS=1`."""
    jax.config.update("jax_check_tracer_leaks", True)
    yield
    jax.config.update("jax_check_tracer_leaks", False)


def test_functions_of_workers(all_threads):
    with coordinated(workers=2) as coordinator:
        with coordinator.strategy.scope():
            v = js.Variable(START)
            table = js.Variable(jnp.ones((4, 2)))
        scaled = jax.jit(lambda x: v * x)

        @coordinator.function
        def fn(x):
            v.assign_add(js.grad(lambda: (scaled(x) * v / 2).sum(), v)())
            table.scatter_add(js.IndexedSlices(jnp.ones((1, 2)), jnp.array([1])))
            return scaled(x)

        found = coordinator.schedule(fn, (2.0,)).fetch()
        coordinator.join()
    np.testing.assert_allclose(found, 6 * START, rtol=1e-6)


def test_what_a_step_leaves_is_found(two, of_two):
    left = []

    def step(x):
        left.append(of_two.shared.value())
        return replica().all_reduce("mean", x)

    with (
        jax.checking_leaks(),
        pytest.raises(js.errors.LeakedTracerError, match="`captured l"),
    ):
        two.run(step, (1.0,))


def test_what_only_jax_sees_is_found(two, of_two):
    left = weakref.WeakKeyDictionary()

    def step(x):
        left[step] = x * of_two.shared
        return replica().all_reduce("mean", x)

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace"):
        two.run(step, (1.0,))
    assert list(left)


def test_programs_stay_where_nobody_looks(two, of_two):
    traces = []

    @jax.jit
    def other(x):
        traces.append(None)
        return 2 * x

    other(1.0)
    two.run(lambda x: of_two.scaled(x), (1.0,))
    js.grad(lambda: of_two.scaled(2.0).sum(), of_two.shared)()
    other(1.0)
    assert len(traces) == 1
