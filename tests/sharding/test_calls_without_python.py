"""A compiled step is called by JAX's compiled code, not by its Python.

`jax.jit` has both. Its Python, at ten times the cost, is what calls a function ever
after that has once raised an exception for such arguments.
"""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import each_of
from helpers.profiled import each_call

import jaxstrategy as js

JAX = str(Path(jax.__file__).parent)


@contextlib.contextmanager
def python_of_jax():
    """Collects JAX's functions of which the block calls jitted ones."""
    found = []

    def called(event, frame):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(JAX):
            if "miss" in code.co_name or "pjit" in code.co_name:
                found.append(code.co_qualname)

    with each_call(called):
        yield found


def trained(strategy, rows):
    return strategy.per_replica(np.ones((strategy.num_replicas_in_sync, rows), "f4"))


def plain(strategy):
    def step(state, x):
        mean = js.get_replica_context().all_reduce("mean", x.mean())
        return [leaf + mean for leaf in state]

    step, state = strategy.run(step), strategy.mirror([jnp.ones(3), jnp.ones(4)])
    return lambda x: step(state, x)


def donated(strategy):
    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def step(state, x):
        return state + js.get_replica_context().all_reduce("mean", x.mean())

    held = [strategy.mirror(jnp.ones(3))]

    def call(x):
        held[0] = step(held[0], x)

    return call


def with_variable(strategy):
    with strategy.scope():
        v = js.Variable(1.0)

    @strategy.run
    def step(x):
        v.assign_add(js.get_replica_context().all_reduce("mean", x.mean()))

    return step


def captured(strategy):
    w = strategy.mirror(jnp.ones(3))
    return strategy.run(lambda x: w + x.sum())


KINDS = [plain, donated, with_variable, captured]


@each_of("kind", KINDS)
def test_a_step_for_batches_of_two_sizes(two, kind, compilations):
    call, large, small = kind(two), trained(two, 4), trained(two, 2)
    for x in (large, small, large, small, small, small, large, large):
        call(x)
    compilations()
    with python_of_jax() as found:
        call(large)
    assert found == []
    for _ in range(2):
        call(small)
    with python_of_jax() as found:
        call(small)
    assert found == []
    assert not compilations(), "each size was compiled once"
