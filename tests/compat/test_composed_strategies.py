"""A strategy is its parts: other ones can be put in, and the facade only asks them."""

import ast
import copy
import inspect
import textwrap

import jax
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.executors._executor import AbstractExecutor
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.strategies._choices import Choices
from jaxstrategy.strategies._composition import ComposedStrategy
from jaxstrategy.variables._policy import ReplicatedVariables


class OneByOne(AbstractExecutor):
    """Calls a step once for each replica, in Python, as a parameter server might."""

    calls = 0

    def program(self, fn, options=None):
        return lambda args, kwargs: self.run(fn, args, kwargs, options)

    def _run(self, fn, args, kwargs, options):
        count = self._strategy.num_replicas_in_sync
        self.calls += count
        versions = [
            fn(*(a.local(i) if isinstance(a, js.PerReplica) else a for a in args))
            for i in range(count)
        ]
        return self._strategy.per_replica(versions)

    def across(self, function, value):
        raise NotImplementedError

    def update(self, devices, fn, args, kwargs):
        raise NotImplementedError


class Served(js.Strategy):
    """Steps one by one, variables on the last device."""

    def __init__(self, devices):
        replicas = Replicas.on(devices)
        home = ReplicatedVariables(replicas, Replicas.on(devices[-1:]))
        self._compose(
            Choices(
                replicas,
                variables=home,
                executor=lambda strategy, _: OneByOne(strategy),
            )
        )


@pytest.fixture
def served():
    return Served(jax.devices()[:3])


def test_steps_run_as_the_executor_runs_them(served):
    x = served.per_replica([1.0, 2.0, 3.0])
    assert served.run(lambda x: x + 1, (x,)).stacked.tolist() == [2, 3, 4]
    step = served.run(lambda x: x * 2)
    assert step(x).stacked.tolist() == [2, 4, 6]
    assert served._executor.calls == 6


def test_variables_live_where_the_policy_says(served):
    with served.scope():
        v = js.Variable(1.0)
        each = js.Variable(0.0, synchronization="on_read", aggregation="sum")
    assert v.devices == tuple(jax.devices()[2:3])
    assert each.devices == tuple(jax.devices()[:3])
    assert served.extended.parameter_devices == tuple(jax.devices()[2:3])


def test_a_deep_copy_is_composed_of_the_same_choices(served):
    twin = copy.deepcopy(served)
    assert type(twin) is Served and twin.devices == served.devices
    assert twin._parameter_replicas.mesh == served._parameter_replicas.mesh
    assert twin._executor is not served._executor
    assert repr(twin) == repr(served) == "Served(3 replicas on cpu:0..2)"


def test_a_strategy_that_counts_as_false_is_one():
    class Empty(js.Strategy):
        def __len__(self):
            return 0

    strategy = Empty(jax.devices()[:2])
    with strategy.scope():
        assert js.get_strategy() is strategy and js.has_strategy()
        assert js.Variable(1.0).strategy is strategy


def test_no_strategy_is_told_from_others_by_a_flag():
    default = js.get_strategy()
    assert not hasattr(default, "is_default")
    assert isinstance(default, ComposedStrategy)
    assert default._replicas.count == 1 and not default._replicas.axes


def test_the_methods_stand_beside_each_other_not_in_a_chain():
    groups = js.Strategy.__bases__
    assert len(groups) > 1
    assert all(group.__bases__ == (ComposedStrategy,) for group in groups)
    methods = [
        {name for name in vars(group) if not name.startswith("_")} for group in groups
    ]
    assert len(set.union(*methods)) == sum(map(len, methods))


@pytest.mark.parametrize("group", js.Strategy.__bases__, ids=lambda g: g.__name__)
def test_the_facade_is_thin(group):
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert methods
    for method in methods:
        documented = ast.get_docstring(method) is not None
        first = method.body[documented]
        assert method.end_lineno - first.lineno < 25, method.name


def test_the_default_strategy_reduces_what_one_replica_has():
    default = js.get_strategy()
    assert default.reduce("mean", 3).dtype == np.float32
    assert default.gather(np.arange(2)).tolist() == [0, 1]
    assert default.extended.update(js.Variable(1.0), lambda v: v.assign_add(2.0)) == 3
