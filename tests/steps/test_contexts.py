"""Which side of `run` code is on, and what a `ReplicaContext` does there."""

import asyncio
import copy
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each, each_of
from helpers.replicas import replica, versions
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


def test_merge_call_of_the_default_strategy():
    seen = []

    def merge(strategy, word):
        seen.append((state(), strategy is js.get_strategy()))
        return f"foo_{word}"

    assert js.get_replica_context().merge_call(merge, ("bar",)) == "foo_bar"
    assert seen == [((False, True, True), True)]
    assert state() == DEFAULT


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


# `ReplicaContext`: reductions, gathers, merge calls, gradients, keys.


def ids(strategy, dtype=np.float32):
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([dtype(i) for i in range(n)])


def on_each(strategy, step, *args):
    """What `step` returns on each replica, whether it is proved equal or not."""
    out = strategy.run(step, args)
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(out)]


def test_what_a_replica_knows_of_itself(strategy):
    seen = []

    def step():
        seen.append((replica().num_replicas_in_sync, replica().devices))
        assert replica().strategy is strategy
        return replica().replica_id_in_sync_group

    out = strategy.run(step)
    n = strategy.num_replicas_in_sync
    assert strategy.experimental_local_results(out) == tuple(range(n))
    assert out.dtype == jnp.int32
    assert seen == [(strategy.num_replicas_in_sync, strategy.devices)]
    assert (
        repr(js.get_replica_context()) == "ReplicaContext(DefaultStrategy(1 replica))"
    )


def test_what_cannot_be_reduced_is_told(two):
    for op, value, error, words in each(
        [
            ("PROD", 1.0, ValueError, "'PROD' is not a valid ReduceOp; 'sum', 'mean',"),
            ("sum", None, ValueError, "there is nothing to reduce"),
            (None, 1.0, TypeError, "A reduce operation was expected, got None"),
            (0, 1.0, TypeError, "A reduce operation was expected, got 0"),
            ("sum", "text", TypeError, "SUM of 'text': an array or a number was want"),
            ("sum", np.array([True]), TypeError, "SUM of a bool array is not .*astype"),
            ("mean", True, TypeError, "MEAN of a bool array is not defined"),
            ("max", 1j, TypeError, "MAX of a complex64 array.*Complex numbers"),
            ("sum", jax.random.key(0), TypeError, "Only numbers can be reduced"),
        ]
    ):
        with pytest.raises(error, match=words):
            two.run(lambda op=op, value=value: replica().all_reduce(op, value), ())
    with pytest.raises(ValueError, match="'PROD' is not a valid ReduceOp"):
        two.reduce("PROD", 1.0)


def test_all_gather_along_each_axis(four):
    def step(i):
        row, pair = i.reshape(1, 1), jnp.stack([i, -i])[None]
        return (
            replica().all_gather(row, 0),
            replica().all_gather(pair, 1),
            replica().all_gather(pair, -1),
            replica().all_gather({"flag": i[None] > 1.5}, axis=0),
        )

    rows, wide, last, flags = four.run(step, (ids(four),))
    assert rows.tolist() == [[0], [1], [2], [3]]
    assert wide.tolist() == last.tolist() == [[0, 0, 1, -1, 2, -2, 3, -3]]
    assert flags["flag"].tolist() == [False, False, True, True]
    assert all(isinstance(leaf, js.Mirrored) for leaf in (rows, wide, flags["flag"]))


def test_gathers_that_make_no_sense(two):
    for value, axis, error, words in each(
        [
            (1.0, 0, ValueError, "Scalars cannot be joined"),
            (np.ones((2, 2)), 2, ValueError, "`axis` is 2, out of range .* use -2 to"),
            (np.ones((2, 2)), -3, ValueError, "`axis` is -3, out of range"),
            (np.ones((2, 2)), 0.5, TypeError, "`axis` was 0.5; a whole number"),
        ]
    ):
        with pytest.raises(error, match=words):
            two.run(lambda v, axis=axis: replica().all_gather(v, axis), (value,))
        with pytest.raises(error, match=words):
            two.gather(value, axis)


# Gradients: TensorFlow's numbers.


def test_gradients_of_all_reduce(four):
    """Those of a local loss are its own, those of what was reduced are reduced."""
    x, c = (
        four.per_replica([0.0, 1.0, 2.0, 2.0]),
        four.per_replica([1.0, 2.0, 3.0, 4.0]),
    )

    def step(w, x, c):
        def local(op):
            return jax.grad(lambda w: replica().all_reduce(op, w * c) ** 2)(w)

        def summed(op):
            return jax.grad(lambda x: c * replica().all_reduce(op, x))(x)

        return {"local": [*map(local, OPS[:2])], "summed": [*map(summed, OPS)]}

    wanted = {
        "local": [[160, 320, 480, 640], [10, 20, 30, 40]],
        # An extreme's goes to the replicas that hold it.
        "summed": [[10] * 4, [2.5] * 4, [0, 0, 5, 5], [10, 0, 0, 0]],
    }
    for run in (four.run, lambda fn, args: jax.jit(lambda *a: four.run(fn, a))(*args)):
        found = run(step, (2.0, x, c))
        for name, rows in wanted.items():
            for have, want in zip(found[name], rows, strict=True):
                have = four.experimental_local_results(have)
                np.testing.assert_allclose(have, want)


OPS = ("sum", "mean", "max", "min")


def test_gradients_of_all_gather_are_summed(four):
    def step(x, c):
        return jax.grad(lambda x: jnp.sum(replica().all_gather(x, 0) * c))(x)

    c = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert on_each(four, step, four.per_replica([[0.0], [1.0], [2.0], [3.0]]), c) == [
        [4], [8], [12], [16],
    ]  # fmt: skip


def test_what_merge_functions_can_do(four):
    def merge(strategy, v):
        kept = strategy.run(lambda u: {"same": u, "text": "t"}, (v,))
        return {
            "per replica": v,
            "sum": strategy.reduce("sum", v),
            "rows": strategy.gather(strategy.run(lambda u: u[None], (v,))),
            "last": v.local(3),
            "all": v.stacked,
            "kept": kept["same"],
            "text": kept["text"],
            "to": strategy.extended.reduce_to("max", v, v),
            "batch": strategy.extended.batch_reduce_to("mean", [(v, v), (2, v)]),
            "times": strategy.reduce("sum", 2.5),
            "scope": in_scope(strategy, v),
        }

    def in_scope(strategy, v):
        with strategy.scope():
            return strategy.reduce("min", v)

    out = four.run(lambda i: replica().merge_call(merge, (i,)), (ids(four),))
    assert versions(out["per replica"]) == versions(out["kept"]) == [0, 1, 2, 3]
    assert (out["sum"], out["last"], out["to"], out["times"]) == (6, 3, 3, 10)
    assert out["rows"].tolist() == out["all"].tolist() == [0, 1, 2, 3]
    assert [float(v) for v in out["batch"]] == [1.5, 2.0]
    assert (out["text"], out["scope"]) == ("t", 0)


def test_merge_call_errors(two):
    with pytest.raises(TypeError, match="`merge_call` was given 3, which cannot be"):
        two.run(lambda: replica().merge_call(3))
    with pytest.raises(TypeError, match="positional argument"):
        two.run(lambda: replica().merge_call(lambda s: 1, (1, 2)))
    with pytest.raises(TypeError, match="used as if it were one array"):
        two.run(lambda x: replica().merge_call(lambda s, v: v + 1, (x,)), (1.0,))


def test_fold_in_of_one_replica():
    key = jax.random.key(3)
    alone, wanted = js.get_replica_context().fold_in(key), jax.random.fold_in(key, 0)
    assert jnp.array_equal(*map(jax.random.key_data, (alone, wanted)))


def test_forward_derivatives(four):
    def step(x):
        return jax.jvp(lambda x: replica().all_reduce("sum", x**2), (x,), (x,))

    out, tangent = four.run(step, (ids(four),))
    assert (out, tangent) == (14, 28)


def test_gradients_flow_through_merge_calls(four):
    def step(w, x):
        def loss(w):
            return replica().merge_call(lambda s, v: s.reduce("sum", v), (w * x,)) ** 2

        return jax.grad(loss)(w)

    x = four.per_replica([1.0, 2.0, 3.0, 4.0])
    assert versions(four.run(step, (2.0, x))) == [160, 320, 480, 640]
