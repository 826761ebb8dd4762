"""What the code that runs is part of: one record, entered in one way."""

import re
from pathlib import Path

import jax
import pytest

import jaxstrategy as js
from jaxstrategy.contexts._context import OUTSIDE, current, entered

PACKAGE = Path(js.__file__).parent


DEVICES = ("CPU:0", "CPU:1")


def places(pattern):
    return [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for _ in re.findall(pattern, path.read_text())
    ]


def test_there_is_one_context_variable():
    assert places(r"= contextvars\.ContextVar\(") == ["contexts/_context.py"]
    assert places(r"\bContextVar\b.*import|import.*\bContextVar\b") == []


def test_jax_is_told_of_one_context():
    assert places(r"jax\.make_user_context\(") == ["contexts/_context.py"]


def test_outside_of_everything_the_context_is_one_object():
    assert current() is OUTSIDE
    strategy = js.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        assert current() is not OUTSIDE
    assert current() is OUTSIDE
    js.experimental_set_strategy(strategy)
    assert current() is not OUTSIDE
    js.experimental_set_strategy(None)
    assert current() is OUTSIDE  # calls of steps are short again


def test_a_block_changes_what_it_names_and_leaves_the_rest():
    strategy = js.OneDeviceStrategy("CPU:0")
    with strategy.scope(), entered(updated=DEVICES):
        assert current().strategy is strategy and current().updated == DEVICES
        with entered(colocated=strategy.replicas):
            now = current()
            assert now.updated == DEVICES and now.colocated == strategy.replicas
        assert current().colocated is None and current().updated == DEVICES
    assert current() is OUTSIDE


def test_a_block_is_left_after_an_error():
    with pytest.raises(KeyError, match="key"), entered(updated=DEVICES):
        raise KeyError("key")
    assert current() is OUTSIDE


def test_a_scope_that_is_not_left_inside_a_block_is_an_error():
    scope = js.OneDeviceStrategy("CPU:0").scope()
    with (
        pytest.raises(js.ContextError, match="left in another order"),
        entered(updated=DEVICES),
    ):
        scope.__enter__()
    assert current() is OUTSIDE


def test_a_jitted_helper_is_traced_once_on_each_side_and_in_each_trace():
    strategy = js.MirroredStrategy(jax.devices()[:2])
    sides = []

    @jax.jit
    def helper(x):
        sides.append(js.in_cross_replica_context())
        return x

    def step(x):
        def merge(_):
            return helper(1.0)

        js.get_replica_context().merge_call(merge)
        return helper(helper(x))

    strategy.run(step, (2.0,))
    assert sides == [True, False]
    helper(2.0)
    assert sides == [True, False, False]  # outside it has a cache of its own
