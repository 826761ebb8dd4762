"""What a program does for a step besides computing it, and what that costs."""

import contextlib
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.profiled import each_call

import jaxstrategy as js

PACKAGE = str(Path(js.__file__).parent)


@contextlib.contextmanager
def calls():
    """Collects the functions of the package that are called in the block."""
    found = []

    def called(event, frame):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            found.append(f"{Path(file).stem}.{frame.f_code.co_qualname}")

    with each_call(called):
        yield found


def test_a_later_call_makes_few_calls_of_the_package(two):
    step = two.run(lambda x, y: {"sum": x + y})
    x, y = two.per_replica([1.0, 2.0]), two.mirror(1.0)
    for _ in range(3):
        step(x, y)
    with calls() as found:
        step(x, y)
    # With JAX 0.10 it is looked where the arguments lie, and on simulated devices steps
    # in flight are counted.
    most = 4 if jax.__version_info__ >= (0, 12) else 8
    counting = ("InFlight", "count_dispatch")
    others = [name for name in found if not any(each in name for each in counting)]
    assert len(others) <= most, found


def test_threads_that_call_a_step_first_trace_it_once(two):
    traces = []

    @two.run
    def step(x):
        traces.append(x.shape)
        return x + 1

    args = [two.per_replica([float(i), 0.0]) for i in range(6)]
    results = [None] * len(args)
    together = threading.Barrier(len(args))

    def call(i):
        together.wait(60)
        results[i] = step(args[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(args))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
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
