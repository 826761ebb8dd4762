"""Which side of `run` code is on: the states, the transitions, and their errors."""

import asyncio
import copy
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest
from helpers.cases import each_of
from helpers.threads import in_threads

import jaxstrategy as js


def state():
    """(has_strategy, in_cross_replica_context, get_replica_context() is None)"""
    return (
        js.has_strategy(),
        js.in_cross_replica_context(),
        js.get_replica_context() is None,
    )


DEFAULT = (False, False, False)
CROSS = (True, True, True)
REPLICA = (True, False, False)


def test_outside_any_scope_there_is_one_replica_and_inside_all(four):
    assert state() == DEFAULT
    replica = js.get_replica_context()
    assert replica.num_replicas_in_sync == 1
    assert replica.replica_id_in_sync_group == 0
    assert replica is js.get_replica_context()
    assert replica.strategy is js.get_strategy() is js.get_strategy()
    with four.scope() as entered:
        assert entered is four is js.get_strategy()
        assert state() == CROSS
    assert state() == DEFAULT


def test_run_and_merge_call_change_sides(four):
    seen = []

    def merge(strategy):
        seen.append(("merge", state(), strategy is four, js.get_strategy() is four))

    def step():
        seen.append(("replica", state(), js.get_strategy() is four))
        js.get_replica_context().merge_call(merge)
        seen.append(("after", state(), js.get_replica_context().strategy is four))

    four.run(step)
    assert seen == [
        ("replica", REPLICA, True),
        ("merge", CROSS, True, True),
        ("after", REPLICA, True),
    ]
    assert state() == DEFAULT


def test_the_same_scope_may_be_entered_again(four):
    first, second = four.scope(), four.scope()
    with first:
        with second:
            with first:
                assert state() == CROSS
            assert js.get_strategy() is four
        assert state() == CROSS
    with second:
        assert js.get_strategy() is four
    assert state() == DEFAULT


def test_another_strategys_scope_inside_is_an_error(two, four):
    with two.scope():
        with pytest.raises(js.errors.ContextError, match="Mixing different Strategy"):
            with four.scope():
                pass
        assert js.get_strategy() is two


@each_of("method, call", [
        ("run", lambda s: s.run(lambda: 1.0)),
        ("reduce", lambda s: s.reduce("sum", 1.0)),
        ("gather", lambda s: s.gather(jnp.ones(1))),
        ("experimental_local_results", lambda s: s.experimental_local_results(1.0)),
        ("extended.batch_reduce_to",
         lambda s: s.extended.reduce_to("sum", 1.0, "CPU:0")),
        ("scope", lambda s: s.scope().__enter__()),
    ])  # fmt: skip
def test_methods_for_all_replicas_are_errors_inside_run(two, method, call):
    with pytest.raises(js.errors.ContextError, match=f"`strategy.{method}`.*merge_cal"):
        two.run(lambda: call(two))
    assert state() == DEFAULT


@each_of("method, call", [
        ("mirror", lambda s: s.mirror(1.0)),
        ("per_replica", lambda s: s.per_replica([1.0, 2.0])),
        ("init", lambda s: s.init(jnp.ones, 3)),
        ("experimental_distribute_dataset",
         lambda s: s.experimental_distribute_dataset([])),
        ("distribute_datasets_from_function",
         lambda s: s.distribute_datasets_from_function(lambda _: [])),
        ("experimental_distribute_values_from_function",
         lambda s: s.experimental_distribute_values_from_function(lambda c: 1.0)),
    ])  # fmt: skip
def test_methods_that_place_values_are_to_be_called_outside(two, method, call):
    told = "while a step is traced and no value is known yet. Call it outside the step"
    told = f"`strategy.{method}` was called inside `{{}}`, {told}"
    with pytest.raises(js.errors.ContextError, match=told.format("run")):
        two.run(lambda: call(two))
    with pytest.raises(js.errors.ContextError, match=told.format("merge_call")):
        two.run(lambda: js.get_replica_context().merge_call(call))
    assert state() == DEFAULT


def test_a_kept_replica_context_is_refused_later(two):
    kept = []
    two.run(lambda: kept.append(js.get_replica_context()))
    for use in (
        lambda: kept[0].all_reduce("sum", 1.0),
        lambda: kept[0].merge_call(lambda s: None),
        lambda: kept[0].all_gather(jnp.ones(1), 0),
        lambda: kept[0].replica_id_in_sync_group,
        lambda: kept[0].fold_in(jax.random.key(0)),
        lambda: two.run(lambda: kept[0].all_reduce("sum", 1.0)),
    ):
        with pytest.raises(js.errors.ContextError, match="Mismatching contexts"):
            use()


def test_merge_call_of_the_default_strategy():
    seen = []

    def merge(strategy, word):
        seen.append((state(), strategy is js.get_strategy()))
        return f"foo_{word}"

    assert js.get_replica_context().merge_call(merge, ("bar",)) == "foo_bar"
    assert seen == [((False, True, True), True)]
    assert state() == DEFAULT


def test_merge_call_inside_the_default_merge_call_is_an_error():
    def merge(strategy):
        strategy._replica_context.merge_call(lambda s: None)

    with pytest.raises(js.errors.ContextError, match="Mismatching contexts"):
        js.get_replica_context().merge_call(merge)


def test_the_default_run_refuses_a_value_of_more_replicas(two):
    with pytest.raises(ValueError, match="first dimension should be the number of"):
        js.get_strategy().run(lambda v: v, (two.per_replica([1.0, 2.0]),))


def test_the_default_scope_is_a_no_op_but_not_inside_another(two):
    with js.get_strategy().scope() as strategy:
        assert state() == DEFAULT
        assert js.get_strategy() is strategy
    default = js.get_strategy()
    with two.scope():
        with pytest.raises(js.errors.ContextError, match="Mixing different"):
            default.scope()
        with pytest.raises(js.errors.ContextError, match="Mixing different"):
            default.run(lambda: None)


def test_experimental_set_strategy_lasts_until_it_is_set_again(two, four):
    js.experimental_set_strategy(two)
    try:
        assert state() == CROSS
        assert js.get_strategy() is two
        with two.scope():
            assert state() == CROSS
        assert two.run(lambda: state() == REPLICA) is True
        js.experimental_set_strategy(four)
        assert js.get_strategy() is four
        js.experimental_set_strategy(js.get_strategy())
    finally:
        js.experimental_set_strategy(None)
    js.experimental_set_strategy(js.get_strategy())
    assert state() == DEFAULT
    with pytest.raises(TypeError, match="a strategy or None was wanted"):
        js.experimental_set_strategy("mirrored")


def test_experimental_set_strategy_is_refused_inside_scope_and_run(two, four):
    refused = pytest.raises(js.errors.ContextError, match="must not be called inside")
    for strategy in (two, four, None):
        with two.scope(), refused:
            js.experimental_set_strategy(strategy)
        with refused:
            two.run(functools.partial(js.experimental_set_strategy, strategy), ())
    js.experimental_set_strategy(two)
    try:
        with two.scope(), refused:
            js.experimental_set_strategy(None)
    finally:
        js.experimental_set_strategy(None)


class Boom(Exception):
    pass


def boom(*_):
    raise Boom("the user's own")


@each_of(
    "step",
    [
        boom,
        lambda *_: js.get_replica_context().merge_call(boom),
        lambda *_: js.get_replica_context().merge_call(lambda s: s.run(boom, ())),
        lambda *_: js.get_replica_context().merge_call(
            lambda s: s.run(lambda: js.get_replica_context().merge_call(boom))
        ),
    ],
)
def test_an_exception_leaves_the_contexts_and_comes_through_unchanged(two, step):
    with two.scope():
        with pytest.raises(Boom, match="the user's own"):
            two.run(step, (1.0,))
        assert state() == CROSS
    assert state() == DEFAULT
    with pytest.raises(Boom), two.scope():
        boom()
    assert state() == DEFAULT
    assert two.run(lambda: js.get_replica_context().all_reduce("sum", 1)) == 2


def test_leaving_in_the_wrong_order_is_an_error_and_changes_nothing(two):
    outer, inner = two.scope(), two.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(js.errors.ContextError, match="another order"):
        outer.__exit__(None, None, None)
    assert state() == CROSS
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert state() == DEFAULT


def test_a_scope_left_open_in_merge_call_is_an_error(two):
    def merge(strategy):
        strategy.scope().__enter__()

    with pytest.raises(js.errors.ContextError, match="another order"):
        two.run(lambda: js.get_replica_context().merge_call(merge))
    assert state() == DEFAULT


def test_each_thread_has_a_context_of_its_own(two, four):
    barrier, seen = threading.Barrier(2), {}

    def work(strategy):
        first = state()
        with strategy.scope():
            barrier.wait(timeout=30)
            seen[strategy] = first, js.get_strategy() is strategy
            barrier.wait(timeout=30)

    with two.scope():
        in_threads(lambda: work(two), lambda: work(four))
    assert seen == {two: (DEFAULT, True), four: (DEFAULT, True)}


def test_asyncio_tasks_have_contexts_of_their_own(two, four):
    async def work(strategy):
        with strategy.scope():
            await asyncio.sleep(0)
            same = js.get_strategy() is strategy
            await asyncio.sleep(0)
            return same and state() == CROSS

    async def both():
        return await asyncio.gather(work(two), work(four)), state()

    assert asyncio.run(both()) == ([True, True], DEFAULT)


def test_a_jitted_helper_is_traced_again_on_each_side(four):
    @jax.jit
    def reduced(x):
        return js.get_replica_context().all_reduce("sum", x)

    @jax.jit
    def sided(x):
        return x if js.in_cross_replica_context() else 10 * x

    def step(x):
        across = js.get_replica_context().merge_call(lambda s: sided(x))
        return reduced(x), sided(x), across

    assert reduced(1.0) == 1.0  # alone
    assert four.run(step, (1.0,)) == (4.0, 10.0, 1.0)
    assert reduced(1.0) == 1.0


def test_a_strategy_can_be_deep_copied_only(two):
    twin = copy.deepcopy({"strategy": two})["strategy"]
    assert twin is not two and type(twin) is type(two)
    assert twin.devices == two.devices
    assert twin.run(lambda: js.get_strategy() is twin) is True
    assert twin.extended is not two.extended
    assert copy.deepcopy(js.get_strategy()) is js.get_strategy()
    with pytest.raises(RuntimeError, match="deep-copied"):
        copy.copy(two)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(two)


@each_of("wrong", ["cpu", None, 3])
def test_a_replica_context_of_something_else_is_refused(wrong):
    with pytest.raises(TypeError, match="`strategy` was .*; a strategy was wanted"):
        js.ReplicaContext(wrong)
