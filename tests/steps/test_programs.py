"""Calls that are alike share one trace and one program; many programs are warned of."""

import collections
import dataclasses
import gc
import subprocess
import sys
import threading
import typing
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each
from helpers.replicas import Named, Pair, ids, replica, versions
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js


def test_the_function_is_called_once_per_signature(strategy, compilations):
    calls = []

    def step(x, k):
        calls.append(1)
        return x * k

    x = ids(strategy)
    k = strategy.mirror(2.0)
    strategy.run(step, (x, k))
    assert len(calls) == 1
    compilations()
    for _ in range(10):
        strategy.run(step, (x, k))
    assert (len(calls), compilations()) == (1, 0)
    strategy.run(step, (strategy.per_replica(np.ones((len(x.values), 3))), k))
    assert len(calls) == 2


PLACES = {
    "numpy": lambda x, s: x,
    "uncommitted": lambda x, s: jnp.asarray(x),
    "elsewhere": lambda x, s: jax.device_put(x, jax.devices()[5]),
    "whole on another axis": lambda x, s: jax.device_put(
        x, NamedSharding(Mesh(np.array(jax.devices()[:4]), "z"), PartitionSpec())
    ),
}


def test_state_and_arguments_are_placed_and_compile_nothing_again(four, compilations):
    calls = []

    def step(state, x):
        calls.append(1)
        return state + replica().all_reduce("sum", x)

    x = four.mirror(jnp.ones(4))
    four.run(step, (four.mirror(jnp.zeros(4)), x))
    for _, place in each(PLACES):
        state = four.run(step, (place(np.zeros(4, np.float32), four), x))
        four.run(step, (state, place(np.ones(4, np.float32), four)))
        elsewhere = place(np.ones(4, np.float32), four)
        compilations()
        for given in (x, elsewhere, x):
            state = four.run(step, (state, given))
        assert compilations() == 0 and isinstance(state, js.Mirrored)
        np.testing.assert_array_equal(state, [16.0] * 4)
    assert len(calls) == 1


def test_arrays_on_the_same_devices_in_another_order_are_placed(four):
    """JAX 0.10 ends the process where a program that was called gets one."""
    other = js.MirroredStrategy(jax.devices()[:4][::-1])

    @four.run
    def step(state, x):
        return state + replica().all_reduce("sum", x)

    x = four.mirror(jnp.ones(4))
    state = step(four.mirror(jnp.zeros(4)), x)
    for _ in range(3):
        state = step(other.mirror(state), other.mirror(x))
        state = step(state, x)
    np.testing.assert_array_equal(state, [4.0 * 7] * 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    value: typing.Any
    scale: float = dataclasses.field(metadata={"static": True})


def test_arguments_that_look_alike_are_told_apart(two):
    x = two.mirror(jnp.ones(2))
    alike = [
        {"a": x, "b": x},
        collections.OrderedDict(b=x, a=x),
        collections.OrderedDict(a=x, b=x),
        (x, x),
        [x, x],
        Named(x, x),
        Pair(x, x),
        Scaled(x, 1.0),
        Scaled(x, 2.0),
        x,
        (x, None),
        (x, (x,)),
        (x, {"a": x}),
        (x, js.PerReplica(jnp.ones((2, 2)))),
        (x, "text"),
        (x, True),
        (x,),
        None,
        (),
    ]

    def step(argument):
        return repr(jax.tree.structure(argument)), type(argument).__name__

    def is_array(node):  # inside
        return isinstance(node, js.PerReplica)

    for argument in 2 * alike:
        structure, kind = two.run(step, (argument,))
        assert structure == repr(jax.tree.structure(argument, is_leaf=is_array))
        assert argument is x or kind == type(argument).__name__


def test_programs_are_forgotten_with_their_function(two):
    def run_once():
        big = jnp.ones(3)

        def step(x):
            return x + big

        two.run(step, (1.0,))
        return weakref.ref(step), weakref.ref(two._executor.program(step, None))

    step, programs = run_once()
    gc.collect()
    assert step() is None and programs() is None


def test_strategies_can_be_collected():
    strategy = js.MirroredStrategy(jax.devices()[:2])
    strategy.run(lambda: replica().all_reduce("sum", 1.0))
    alive = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert alive() is None


def test_grad_of_an_outer_function(four):
    x = four.per_replica([1.0, 2.0, 3.0, 4.0])

    def total(w, v):
        return four.reduce("sum", four.run(lambda a, b: jnp.sin(a) * b, (w, v)))

    expected = np.cos(2.0) * 10.0
    np.testing.assert_allclose(jax.grad(total)(2.0, x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(2.0, x), expected, rtol=1e-6)
    committed = jax.device_put(2.0, jax.devices()[7])
    np.testing.assert_allclose(jax.grad(total)(committed, x), expected, rtol=1e-6)
    by_replica = jax.grad(total, 1)(2.0, x)
    assert isinstance(by_replica, js.PerReplica)
    np.testing.assert_allclose(versions(by_replica), [np.sin(2.0)] * 4, rtol=1e-6)


FAILING = """
import jax, jax.numpy as jnp, jaxstrategy as js
two = js.MirroredStrategy(js.simulate(2))

def fail(x):
    raise RuntimeError("the device said no")

def bad(x):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)

def good(x):
    return js.get_replica_context().all_reduce("sum", x)

out = two.run(bad, (1.0,))  # returns before the devices are done
try:
    out.values[0].block_until_ready()
except jax.errors.JaxRuntimeError as error:
    assert "the device said no" in str(error)
    print("reported")
for _ in range(20):  # steps after it do not report it again
    assert two.run(good, (1.0,)) == 2.0
print("went on", flush=True)
__import__("os")._exit(0)
"""


def test_a_failed_step_is_reported_where_its_result_is_read():
    done = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[:2] == ["reported", "went on"], done


def warned(recwarn):
    found = [w for w in recwarn if w.category is js.errors.RecompilationWarning]
    assert len(found) <= 1, [str(w.message) for w in found]
    return str(found[0].message) if found else None


@pytest.fixture
def warnings_are_kept():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_a_new_lambda_each_time_gives_one_warning(two, warnings_are_kept, recwarn):
    for i in range(8):
        two.run(lambda x: x + i, (1.0,))  # noqa: B023
    text = warned(recwarn)
    assert "compiled for the 3rd time" in text and "new function object" in text
    (warning,) = [w for w in recwarn if w.category is js.errors.RecompilationWarning]
    assert warning.filename == __file__


CHANGING = [
    (lambda x, mode: x, lambda i: (1.0, f"mode {i}"),
     "static argument `mode` changed: it was 'mode 4', is 'mode 5'"),
    (lambda batch: batch["x"] * 2, lambda i: ({"x": jnp.ones((i + 1, 2))},),
     "shape or dtype of `batch['x']` changed: it was float32[5,2], is float32[6,2]"),
    (lambda batch: 1.0, lambda i: ({f"key{i}": 1.0},),
     "structure of its arguments changed"),
]  # fmt: skip


@pytest.mark.parametrize("step, arguments, told", CHANGING)
def test_what_changes_gives_one_warning(
    two, warnings_are_kept, recwarn, step, arguments, told
):
    for i in range(8):
        two.run(step, arguments(i))
    assert told in warned(recwarn)


def test_what_was_worth_compiling_and_a_few_shapes_give_no_warning(two, recwarn):
    for rate in range(4):
        step = lambda x: x * rate  # noqa: B023, E731
        for _ in range(10):
            two.run(step, (jnp.ones(rate + 1),))
    step = lambda x: x * 2  # noqa: E731
    for n in (1, 2, 3, 4, 5):
        two.run(step, (jnp.ones(n),))
    for n in range(1, 12):  # a program of our own
        two.reduce("sum", js.PerReplica(np.ones((2, n))))
    assert warned(recwarn) is None


def test_run_returns_before_the_devices_are_done():
    """Were it to block, the callback would wait in vain for `run` to return."""
    strategy = js.MirroredStrategy(jax.devices()[:2])
    returned = threading.Event()
    seen = []

    def wait(x):
        seen.append(returned.wait(timeout=30))
        return x

    def step(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)

    out = strategy.run(step, (1.0,))
    returned.set()
    assert versions(out) == [1.0, 1.0]
    assert seen == [True, True]
