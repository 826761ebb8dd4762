"""Calls that are alike share one trace and one program, and later ones are short."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import subprocess
import sys
import threading
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each
from helpers.replicas import Named, Pair, ids, mirrored, replica, versions
from helpers.threads import in_threads
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js
from jaxstrategy._src.tracing import step_arguments


@contextlib.contextmanager
def each_call(called: Callable[[str, FrameType], object]) -> Iterator[None]:
    """Tells `called` of each `"call"` of Python and `"c_call"` of C in the block."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            called(event, frame)

    while step_arguments._running:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # as a test wanted it
            step_arguments._running.popleft().block_until_ready()
    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()


# JAX 0.10 ends the process where an array lies in a wrong order, so each is asked
# where it lies.
ASKED_OF_EACH_ARRAY = () if jax.__version_info__ >= (0, 12) else ("ArrayImpl.sharding",)


def python_calls(call: Callable[[], object]) -> list[str]:
    """The functions of Python that `call` calls, JAX's own included."""
    found: list[str] = []

    def called(event: str, frame: FrameType) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name not in ASKED_OF_EACH_ARRAY:
            found.append(name)

    with each_call(called):
        call()
        count = len(found)  # what follows ends the block
    return found[:count]


# Calls that are alike share one trace and one program, and later ones are short.


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


class Alike:
    def __repr__(self):
        return "Alike()"


CHANGING = [
    (lambda x, mode: x, lambda i: (1.0, f"mode {i}"),
     "static argument `mode` changed: it was 'mode 4', is 'mode 5'"),
    (lambda batch: batch["x"] * 2, lambda i: ({"x": jnp.ones((i + 1, 2))},),
     "shape or dtype of `batch['x']` changed: it was float32[5,2], is float32[6,2]"),
    (lambda batch: 1.0, lambda i: ({f"key{i}": 1.0},),
     "structure of its arguments changed"),
    (lambda apply: 1.0, lambda i: (jax.tree_util.Partial(Alike().__repr__),),
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


# What a program does for a step besides computing it, and what that costs.


def test_threads_that_call_a_step_first_trace_it_once(two):
    traces = []

    @two.run
    def step(x):
        traces.append(x.shape)
        return x + 1

    args = [two.per_replica([float(i), 0.0]) for i in range(6)]
    results = [None] * len(args)

    def call(i):
        results[i] = step(args[i])

    in_threads(*(functools.partial(call, i) for i in range(len(args))))
    assert traces == [()]
    for i, result in enumerate(results):
        np.testing.assert_allclose(result.stacked, [i + 1, 1])


def test_an_error_after_a_new_shape_has_no_context_of_ours(two):
    @two.run
    def step(x):
        if x.shape == (3,):
            raise KeyError("mine")
        return x

    step(two.per_replica([np.zeros(2)] * 2))
    with pytest.raises(KeyError, match="mine") as caught:
        step(two.per_replica([np.zeros(3)] * 2))
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def own_calls(step, *args):
    """How many functions of Python and C a call makes, JAX's own included."""
    found = []
    with each_call(lambda event, frame: found.append(event)):
        step(*args)
    return len(found)


def test_each_shape_is_called_by_the_short_way_through_jax(two):
    # A call that has raised inside `jax.jit` once makes hundreds of calls ever after.
    check_short_way(two, has_variables=False, options=js.RunOptions(donate_argnums=0))
    check_short_way(two, has_variables=True, options=None)


def check_short_way(two, has_variables, options):
    with two.scope():
        total = js.Variable(0.0)

    @two.run(options=options)
    def step(w, x):
        if has_variables:
            total.assign_add(js.get_replica_context().all_reduce("sum", x.sum()))
        return w + x.sum()

    def arguments(rows):
        return two.mirror(np.zeros(3)), two.per_replica([np.ones(rows)] * 2)

    for rows in (2, 3):
        for _ in range(3):
            step(*arguments(rows))
    for rows in (2, 3):
        assert own_calls(step, *arguments(rows)) < 60


# Later calls of a step go to JAX with the user's own trees, and are as right.

OFTEN = 4


def stepping(strategy, leaves=2, **options):
    scale = 2.0  # a variable of the enclosing function

    def step(state, x):
        mean = js.get_replica_context().all_reduce("mean", x.mean() * scale)
        return jax.tree.map(lambda leaf: leaf + mean, state)

    state = strategy.mirror({f"w{i}": np.full(3, i, "f4") for i in range(leaves)})
    return strategy.run(step, options=js.RunOptions(**options)), state


def rows(strategy, *values):
    return strategy.per_replica([np.full(4, value, "f4") for value in values])


# With JAX 0.10 it is looked whether arguments live, and where they lie.
FEW = 6 if jax.__version_info__ >= (0, 12) else 17


def test_a_call_makes_few_calls_of_python_however_many_leaves_there_are(two):
    step, state = stepping(two, leaves=100)
    x = rows(two, 1.0, 3.0)
    for _ in range(OFTEN):
        step(state, x)
    found = python_calls(lambda: step(state, x))
    assert len(found) <= FEW, found
    np.testing.assert_allclose(step(state, x)["w1"], 5.0)


def test_the_masks_of_batches_cost_nothing_once_a_step_asks_for_them(two):
    @two.run
    def step(total, batch):
        mean = js.masked_mean(batch)
        return total + js.get_replica_context().all_reduce("mean", mean)

    data = [np.full(2, i, "f4") for i in range(6)] + [np.ones(1, "f4")]
    total, counts = two.mirror(np.float32(0)), []
    for batch in two.experimental_distribute_dataset(data):

        def call(batch=batch):
            nonlocal total
            total = step(total, batch)

        counts.append(len(python_calls(call)))
    assert float(total) == 16.0
    assert counts[-2] <= FEW + 2


def with_the_last_dict_for_keywords(step, state, x, strategy):
    """To JAX alone, which is given keywords as a dict, these calls are alike."""

    @strategy.run
    def scaled(x, both=None, by=1.0):
        return x * (by if both is None else 10 * both["by"])

    by = {"by": strategy.mirror(np.float32(2))}
    for _ in range(OFTEN):
        np.testing.assert_array_equal(scaled(state["w1"], by), np.full(3, 20))
    np.testing.assert_array_equal(scaled(state["w1"], **by), np.full(3, 2))
    for _ in range(OFTEN):
        scaled(state["w1"], **by)
    return scaled(state["w1"], by), 20.0


def full(*shape):
    return np.full(shape, 3.0, np.float32)


# Of each call what comes out, and what it should be.
OTHERS = [
    with_the_last_dict_for_keywords,
    lambda step, w, x, two: (step({**w, "v": w["w0"]}, x)["v"], 4.0),
    lambda step, w, x, two: (step(state=w, x=x)["w1"], 5.0),
    lambda step, w, x, two: (step({**w, "w1": 3}, x)["w1"], 7.0),
    lambda step, w, x, two: (step({**w, "w1": full(3)}, x)["w1"], 7.0),
    lambda step, w, x, two: (
        step({**w, "w1": jax.device_put(full(3), jax.devices()[5])}, x)["w1"], 7.0),
    lambda step, w, x, two: (step({**w, "w1": two.mirror(full(2, 3))}, x)["w1"], 7.0),
    lambda step, w, x, two: (step(w, two.mirror(full(4)))["w1"], 7.0),
    lambda step, w, x, two: (step(w, js.PerReplica(full(2, 4)))["w1"], 7.0),
]  # fmt: skip


def test_a_call_with_other_arguments(two):
    step, state = stepping(two)
    x = rows(two, 1.0, 3.0)
    for other in each(OTHERS):
        for _ in range(OFTEN):
            usual = step(state, x)
        for _ in range(OFTEN + 1):  # however often JAX refuses them
            got, wanted = other(step, state, x, two)
            np.testing.assert_allclose(got, np.full_like(got, wanted))
            usual = step(state, x)
        np.testing.assert_allclose(usual["w1"], 5.0)


def deleted():
    gone = jnp.ones(3) + 0
    gone.delete()
    return gone


REFUSED = [
    (lambda step, w, x, two: step({**w, "w1": deleted()}, x),
     js.errors.DonatedValueError, "`state.'w1'.` was donated to an earlier call"),
    (lambda step, w, x, two: step({**w, "w1": rows(two, 1.0, 1.0).stacked}, x),
     js.errors.PlacementError, "`state.'w1'.` is a plain array that is split"),
    (lambda step, w, x, two: step(w, rows(mirrored(4), 1.0, 3.0, 1.0, 3.0)),
     js.errors.PlacementError, "`x` is a PerReplica for 4 replicas"),
    (lambda step, w, x, two: step({**w, "w1": {1, 2}}, x),
     TypeError, "`state.'w1'.` is {1, 2}, a set: not an array"),
]  # fmt: skip


def test_a_call_that_is_refused_says_the_same_as_the_first_one(two):
    step, state = stepping(two)
    x = rows(two, 1.0, 3.0)
    for times in (1, OFTEN + 1):
        for other, error, text in each(REFUSED):
            for _ in range(times):
                with pytest.raises(error, match=text):
                    other(step, state, x, two)
        for _ in range(OFTEN):
            usual = step(state, x)
    np.testing.assert_allclose(usual["w1"], 5.0)


# Bound steps write their objects' arrays without asking again, and as rightly.


class Sums(nnx.Module):
    def __init__(self, count):
        self.totals = nnx.List([nnx.Variable(jnp.zeros(2)) for _ in range(count)])


def add(sums, x):
    mean = js.get_replica_context().all_reduce("mean", x)
    for total in sums.totals:
        total[...] += mean


def test_a_call_makes_few_calls_of_python_however_many_variables_there_are(two):
    x = two.per_replica([1.0, 3.0])
    counts = []
    for count in (2, 40):
        sums = Sums(count)
        step = two.run(add).bind(sums)
        for _ in range(OFTEN):
            step(x)
        counts.append(len(python_calls(lambda step=step: step(x))))
        np.testing.assert_array_equal(sums.totals[-1][...], [10.0, 10.0])
    assert max(counts) <= min(counts) + 5 <= 40, counts


class Watched(nnx.Variable):
    """A variable of a user who wants to know of each value."""

    def set_raw_value(self, value, **options):
        SEEN.append(value)
        super().set_raw_value(value, **options)


SEEN = []


def test_a_variable_with_a_setter_of_its_own_is_set_by_it(two):
    sums, x = Sums(1), two.per_replica([1.0, 3.0])
    sums.totals[0] = Watched(jnp.zeros(2))
    step = two.run(add).bind(sums)
    before = len(SEEN)
    for _ in range(OFTEN):
        step(x)
    values = [v for v in SEEN[before:] if not isinstance(v, jax.core.Tracer)]
    assert len(values) == OFTEN
    assert sums.totals[0].get_raw_value() is values[-1]


def test_a_trace_is_noticed_after_calls_outside_of_any(two):
    sums, x = Sums(1), two.per_replica([1.0, 3.0])
    step = two.run(add).bind(sums)
    for _ in range(OFTEN):
        step(x)
    with pytest.raises(js.errors.ObjectError, match="inside a function that JAX"):
        jax.jit(lambda: step(x))()
    np.testing.assert_array_equal(sums.totals[0][...], np.full(2, 2.0 * OFTEN))
    step(x)
    np.testing.assert_array_equal(sums.totals[0][...], np.full(2, 2.0 * OFTEN + 2))
