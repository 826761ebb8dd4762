"""`@strategy.step`, which makes a step of any function and calls none."""

import functools

import numpy as np
import pytest

import jaxstrategy as js


def test_a_function_without_arguments_is_not_called(strategy):
    calls = []

    @strategy.step
    def count():
        calls.append(1)
        return js.get_replica_context().all_reduce("sum", 1)

    assert not calls
    assert int(count()) == int(count()) == strategy.num_replicas_in_sync
    assert len(calls) == 1


def test_it_takes_options_and_is_what_run_makes(two):
    options = js.RunOptions(donate_argnums=0)

    @two.step(options=options)
    def add(total, x=1.0):
        return total + js.get_replica_context().all_reduce("sum", x)

    total = two.mirror(1.0)
    assert add(total) == 3 and total.is_deleted()
    assert add.options is options and add.__name__ == "add"
    assert type(add) is type(two.run(lambda x: x))


def test_under_the_default_strategy():
    calls = []
    step = js.get_strategy().step(lambda: calls.append(1))
    assert not calls
    step()
    assert calls


def test_what_cannot_be_called_is_refused(two):
    with pytest.raises(TypeError, match="`step` was given 3, which cannot be called"):
        two.step(3)
    with pytest.raises(TypeError, match="RunOptions"):
        two.step(options="fast")
    with pytest.raises(TypeError):
        two.step(np.sum, (1,))  # arguments are for `run`


def test_run_refuses_to_guess_where_no_parameter_needs_a_value(two):
    def count(by=1, *rest, scale=2.0):
        return js.get_replica_context().all_reduce("sum", by)

    advice = (
        r"`by=1, \*rest, scale=2.0` and needs none.*`@strategy.step`.*run\(count, args"
    )
    for fn in (count, two.step(count)):
        with pytest.raises(TypeError, match=advice):
            two.run(fn)
    with pytest.raises(TypeError, match=r"`\*args, \*\*kwargs` and needs none"):
        two.run(lambda *args, **kwargs: 0)
    assert two.run(count, args=()) == two.run(count, ()) == 2
    assert two.run(count, kwargs={"by": 3}) == 6
    assert two.run(functools.partial(lambda by=1: by, by=5)) == 5
    assert two.run(lambda: 7) == 7  # as in TensorFlow
