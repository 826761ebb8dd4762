"""`strategy.run`: roles of arguments and results, placement, caching, errors."""

import collections
import dataclasses
import functools
import gc
import inspect
import subprocess
import sys
import threading
import typing
import warnings
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js


def ids(strategy):
    return strategy.per_replica(
        [float(i) for i in range(strategy.num_replicas_in_sync)]
    )


def versions(value):
    return [np.asarray(v).tolist() for v in value.values]


def replica():
    return js.get_replica_context()


# What arguments are inside the step.


def test_per_replica_arguments_are_unwrapped_and_others_are_the_same(four):
    out = four.run(lambda x, k, y: x + 10 * k + y, (ids(four), 2.0), {"y": 0.5})
    assert versions(out) == [20.5, 21.5, 22.5, 23.5]


@dataclasses.dataclass
class Pair:
    first: typing.Any
    second: typing.Any


jax.tree_util.register_dataclass(Pair, ["first", "second"], [])
Named = collections.namedtuple("Named", "a b")


def test_leaves_in_nested_structures_are_unwrapped(four):
    a = ids(four)
    b = four.per_replica([0.0, 100.0, 200.0, 300.0])
    assert versions(four.run(lambda d: d["a"][0] + d["b"], ({"a": (a,), "b": b},))) == [
        0,
        101,
        202,
        303,
    ]
    assert versions(four.run(lambda p: p.first + p.second[0], (Pair(a, [b]),))) == [
        0, 101, 202, 303,
    ]  # fmt: skip
    assert versions(four.run(lambda n: n.a + n.b, (Named(a, b),))) == [0, 101, 202, 303]


def test_results_keep_their_structure(four):
    def step(x):
        return {
            "named": Named(x, 2 * x),
            "ordered": collections.OrderedDict(z=x, a=(x, [x])),
            "empty": ((), {}, None),
        }

    out = four.run(step, (ids(four),))
    assert isinstance(out["named"], Named)
    assert versions(out["named"].b) == [0, 2, 4, 6]
    assert list(out["ordered"]) == ["z", "a"]
    assert isinstance(out["ordered"]["a"][1][0], js.PerReplica)
    assert out["empty"] == ((), {}, None)


def test_plain_leaves_come_back_as_they_are(four):
    marker = object()

    def step(x, text, flag, thing):
        return x, None, "text", text, 3.0, 7, flag, thing, np.float32, ReduceOp.SUM

    ReduceOp = js.ReduceOp
    out = four.run(step, (ids(four), "given", True, marker))
    assert out[1:] == (
        None, "text", "given", 3.0, 7, True, marker, np.float32, ReduceOp.SUM,
    )  # fmt: skip
    assert type(out[4]) is float and type(out[5]) is int


def test_static_arguments_are_python_values_inside(four):
    def step(x, flag, mode, nothing):
        assert nothing is None
        return x + 1 if flag and mode == "add" else x * 10

    x = ids(four)
    assert versions(four.run(step, (x, True, "add", None))) == [1, 2, 3, 4]
    assert versions(four.run(step, (x, False, "add", None))) == [0, 10, 20, 30]
    assert versions(four.run(step, (x, True, "mul", None))) == [0, 10, 20, 30]


def test_true_and_one_are_different_programs(two):
    seen = []

    def step(n):
        seen.append(type(n) is bool)
        return 0

    for value in (True, 1, True, 1.0):
        two.run(step, (value,))
    assert seen == [True, False, False]  # 1 and 1.0 are traced, per dtype


def test_numpy_and_jax_arrays_are_the_same_on_every_replica(strategy):
    def step(a, b, c):
        return replica().all_reduce("sum", a + b + c)

    n = strategy.num_replicas_in_sync
    out = strategy.run(step, (np.arange(3), jnp.ones(3), np.float64(2.0)))
    np.testing.assert_array_equal(out, n * (np.arange(3) + 3.0))


def test_arrays_of_other_libraries_are_traced_not_static(two):
    class Tensor:
        def __init__(self, data):
            self.data = data

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.data, dtype)

    class JaxLike(Tensor):
        def __jax_array__(self):
            return jnp.asarray(self.data)

    traces = []

    def step(x):
        traces.append(x.shape)
        return x + 1

    for kind in (Tensor, JaxLike):
        for value in (1.0, 2.0, 3.0):
            assert two.run(step, (kind(value),)) == value + 1
    assert len(traces) == 1  # the same shape and dtype: one trace for all six


def test_random_keys_pass(four):
    keys = four.per_replica(list(jax.random.split(jax.random.key(0), 4)))
    one = jax.random.key(7)

    def step(key, same):
        return jax.random.normal(key, (2,)), jax.random.fold_in(key, 1), same

    normal, folded, same = four.run(step, (keys, one))
    split = jax.random.split(jax.random.key(0), 4)
    expected = [jax.random.normal(k, (2,)) for k in split]
    np.testing.assert_allclose(np.stack(normal.values), np.stack(expected))
    assert isinstance(folded, js.PerReplica) and isinstance(same, js.Mirrored)
    assert jnp.issubdtype(same.dtype, jax.dtypes.prng_key)


def test_keyword_and_default_arguments(two):
    def step(a, *rest, scale=2.0, **named):
        return (a + sum(rest)) * scale + named["shift"]

    assert two.run(step, (1.0, 2.0, 3.0), {"shift": 0.5}) == 12.5
    assert two.run(step, [1.0], {"shift": 0.5, "scale": 3.0}) == 3.5


def test_errors_of_the_call_itself_are_pythons(two):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        two.run(lambda a: a, ())
    with pytest.raises(TypeError, match="got multiple values for argument"):
        two.run(lambda a: a, (1,), {"a": 2})


# What results are.


def test_results_are_mirrored_or_per_replica_leaf_by_leaf(four):
    def step(w, x):
        total = replica().all_reduce("sum", x)
        return {"w": w * 2, "x": x, "sum": total, "both": total + x, "id": id_()}

    def id_():
        return replica().replica_id_in_sync_group

    out = four.run(step, (jnp.float32(3.0), ids(four)))
    kinds = {name: type(value) is js.PerReplica for name, value in out.items()}
    assert kinds == {"w": False, "x": True, "sum": False, "both": True, "id": True}
    assert isinstance(out["w"], js.Mirrored) and out["w"] == 6.0
    assert isinstance(out["sum"], js.Mirrored) and out["sum"] == 6.0
    assert versions(out["both"]) == [6, 7, 8, 9]
    assert versions(out["id"]) == [0, 1, 2, 3] and out["id"].dtype == jnp.int32


def test_what_may_differ_is_per_replica_where_there_are_several(strategy):
    local, total = strategy.run(
        lambda x: (x, replica().all_reduce("sum", x)), (ids(strategy),)
    )
    assert isinstance(total, js.Mirrored)
    several = strategy.num_replicas_in_sync > 1
    assert isinstance(local, js.PerReplica if several else js.Mirrored)


def test_closed_over_values_are_the_same_on_every_replica(four):
    table = jax.device_put(jnp.arange(4.0), jax.devices()[6])
    host = np.ones(2)
    out = four.run(lambda: (table * 2, host, replica().all_reduce("sum", host)))
    np.testing.assert_array_equal(out[0], [0, 2, 4, 6])
    np.testing.assert_array_equal(out[1], [1, 1])
    np.testing.assert_array_equal(out[2], [4, 4])
    assert all(isinstance(leaf, js.Mirrored) for leaf in out)


def test_a_step_may_return_nothing(two):
    assert two.run(lambda: None) is None
    assert two.run(lambda x: (), (1.0,)) == ()


def test_effects_of_a_step_without_results_happen_on_every_replica(two):
    seen = []

    def note(i):
        seen.append(int(i))

    def step(x):
        jax.debug.callback(note, replica().replica_id_in_sync_group)

    two.run(step, (1.0,))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1]


def test_a_train_state_stays_a_train_state(four):
    model = nn.Dense(2)
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3) / 24

    def build(key):
        params = model.init(key, x[:1])
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adam(0.1)
        )

    def loss(params, batch):
        return jnp.mean((model.apply(params, batch) - 1.0) ** 2)

    @four.run
    def step(state, batch):
        grads = jax.grad(loss)(state.params, batch)
        return state.apply_gradients(grads=replica().all_reduce("mean", grads))

    state = four.init(build, jax.random.key(0))
    (batch,) = four.experimental_distribute_dataset([x])
    alone = build(jax.random.key(0))
    for _ in range(3):
        state = step(state, batch)
        alone = alone.apply_gradients(grads=jax.grad(loss)(alone.params, x))
    assert isinstance(state, TrainState) and int(state.step) == 3
    leaves = jax.tree.leaves(state)
    assert leaves and all(isinstance(leaf, js.Mirrored) for leaf in leaves)
    chex.assert_trees_all_close(state.params, alone.params, rtol=1e-5)


# One trace, one program.


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


@pytest.mark.parametrize(
    "place",
    [
        lambda x, s: x,
        lambda x, s: jnp.asarray(x),
        lambda x, s: jax.device_put(x, jax.devices()[0]),
        lambda x, s: jax.device_put(x, jax.devices()[5]),
        lambda x, s: js.MirroredStrategy(jax.devices()[4:6]).mirror(x),
        lambda x, s: js.MirroredStrategy(jax.devices()[:4][::-1]).mirror(x),
        lambda x, s: jax.device_put(
            x, NamedSharding(Mesh(np.array(jax.devices()[:4]), "z"), PartitionSpec())
        ),
        lambda x, s: s.mirror(x),
    ],
    ids=["numpy", "uncommitted", "first", "elsewhere", "other-mesh", "reversed",
         "whole-on-another-axis", "mirrored"],
)  # fmt: skip
def test_state_is_placed_once_and_compiled_once(four, compilations, place):
    def step(state, x):
        return state + replica().all_reduce("sum", x)

    x = four.mirror(jnp.ones(4))
    state = place(np.zeros(4, np.float32), four)
    compilations()
    state = four.run(step, (state, x))
    first = compilations()
    for _ in range(3):
        state = four.run(step, (state, x))
    assert first >= 1 and compilations() == 0
    assert isinstance(state, js.Mirrored)
    np.testing.assert_array_equal(state, [16.0] * 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones(3, np.float32),
        lambda: jnp.ones(3),
        lambda: jax.device_put(jnp.ones(3), jax.devices()[6]),
    ],
    ids=["numpy", "uncommitted", "elsewhere"],
)
def test_arguments_from_elsewhere_compile_nothing_again(strategy, compilations, make):
    n = strategy.num_replicas_in_sync
    calls = []

    def step(state, x):
        calls.append(1)
        return state + replica().all_reduce("sum", x)

    state = make()  # the state comes from elsewhere too, at first
    state = strategy.run(step, (state, make()))
    mirrored = strategy.mirror(np.ones(3, np.float32))
    make(), compilations()
    for _ in range(3):
        state = strategy.run(step, (state, make()))
    for _ in range(3):
        state = strategy.run(step, (state, mirrored))
    assert (len(calls), compilations()) == (1, 0)
    assert state.tolist() == [1 + 7 * n] * 3
    strategy.run(step, (strategy.mirror(jnp.zeros(2)), jnp.ones(2)))
    assert len(calls) == 2


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

    def as_seen(argument):  # a PerReplica is an array inside
        return jax.tree.map(lambda leaf: 0, argument, is_leaf=js_per_replica)

    def js_per_replica(node):
        return isinstance(node, js.PerReplica)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.RecompilationWarning)
        for _ in range(2):
            for argument in alike:
                structure, kind = two.run(step, (argument,))
                assert structure == repr(jax.tree.structure(as_seen(argument)))
                assert argument is x or kind == type(argument).__name__


def test_a_host_stacked_per_replica_is_split_over_the_devices(four):
    x = js.PerReplica(np.arange(8.0).reshape(4, 2))
    for value in (x, js.PerReplica(jnp.arange(8.0).reshape(4, 2))):
        for _ in range(2):
            out = four.run(lambda v: v + 1, (value,))
            assert versions(out) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_one_step_works_under_several_strategies(two, four):
    def step(x):
        return replica().all_reduce("sum", x)

    for _ in range(2):
        assert two.run(step, (1.0,)) == 2.0
        assert four.run(step, (1.0,)) == 4.0


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


def test_arguments_are_not_kept_alive(two):
    def step(x):
        return x * 2

    x = jnp.ones(1000)
    alive = weakref.ref(x)
    for _ in range(2):
        two.run(step, (x,)).block_until_ready()
    del x
    gc.collect()
    assert alive() is None


def test_strategies_can_be_collected():
    strategy = js.MirroredStrategy(jax.devices()[:2])
    strategy.run(lambda: replica().all_reduce("sum", 1.0))
    alive = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert alive() is None


def test_run_returns_the_same_inside_and_outside_jit(four):
    x = ids(four)

    def step(v, k):
        return v * k, replica().all_reduce("sum", v * k)

    def whole(v, k):
        local, total = four.run(step, (v, k))
        return local, total, four.reduce("mean", local), four.gather(
            four.run(lambda u: u[None], (local,))
        )  # fmt: skip

    eager, jitted = whole(x, 2.0), jax.jit(whole)(x, 2.0)
    assert versions(eager[0]) == versions(jitted[0]) == [0, 2, 4, 6]
    assert eager[1] == jitted[1] == 12
    assert eager[2] == jitted[2] == 3
    np.testing.assert_array_equal(eager[3], jitted[3])
    np.testing.assert_array_equal(jitted[3], [0, 2, 4, 6])


def test_local_results_under_jit(four):
    def whole(v):
        local, total = four.run(lambda u: (u, replica().all_reduce("sum", u)), (v,))
        return four.experimental_local_results((local, total))

    for out in (whole(ids(four)), jax.jit(whole)(ids(four))):
        assert [(float(a), float(b)) for a, b in out] == [
            (0, 6),
            (1, 6),
            (2, 6),
            (3, 6),
        ]


def test_run_inside_scan_and_fori_loop(four):
    x = ids(four)

    def step(total, v):
        return total + replica().all_reduce("sum", v)

    @jax.jit
    def scanned(total):
        return jax.lax.scan(
            lambda c, _: (four.run(step, (c, x)), None), total, None, 5
        )[0]

    @jax.jit
    def looped(v):
        return jax.lax.fori_loop(0, 10, lambda _, c: four.run(lambda u: u + 1, (c,)), v)

    assert scanned(0.0) == 30.0
    np.testing.assert_array_equal(versions(looped(x)), [10, 11, 12, 13])
    assert four.reduce("sum", looped(four.per_replica([0.0] * 4))) == 40


def test_two_runs_in_one_jit_see_each_others_results(two):
    @jax.jit
    def whole(v):
        for _ in range(2):
            v = two.run(lambda u: u + replica().all_reduce("sum", u), (v,))
        return v

    assert whole(1.0) == 9.0


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


def test_grad_through_a_mirrored_result(four):
    x = four.per_replica([1.0, 2.0, 3.0, 4.0])

    def total(w):
        return four.run(lambda a, b: replica().all_reduce("sum", a * b) * a, (w, x))

    np.testing.assert_allclose(total(3.0), 90.0)
    np.testing.assert_allclose(jax.grad(total)(3.0), 60.0)  # d/dw 10 w^2


def test_checkpoint_scan_and_custom_derivatives_inside(two):
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))

    def loss(w, x):
        @jax.checkpoint
        def layer(h, _):
            return clipped(jnp.tanh(h * w)), None

        h, _ = jax.lax.scan(layer, x, None, 3)
        return jnp.sum(h)

    def step(w, x):
        return replica().all_reduce("mean", jax.grad(loss)(w, x))

    x = np.array([[0.3, -0.2], [0.5, 0.9]], np.float32)
    out = two.run(step, (1.5, js.PerReplica(x)))
    expected = np.mean([jax.grad(loss)(1.5, row) for row in x])
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_vmap_over_run(two):
    def step(a):
        return replica().all_reduce("sum", a)

    out = jax.vmap(lambda a: two.run(step, (a,)))(jnp.arange(3.0))
    np.testing.assert_array_equal(out, [0, 2, 4])


def test_five_thousand_calls_without_waiting():
    strategy = js.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 8

    @strategy.run
    def step(total, x):
        return total + replica().all_reduce("mean", x)

    total = strategy.mirror(jnp.zeros(4))
    x = strategy.mirror(jnp.ones(4))
    for _ in range(5000):
        total = step(total, x)
    np.testing.assert_array_equal(total, [5000.0] * 4)


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


# Donation.


def test_donated_state_is_updated_in_place(four):
    @four.run(options=js.RunOptions(donate_argnums=0))
    def step(state, x):
        return {"w": state["w"] + replica().all_reduce("sum", x)}

    state = four.mirror({"w": jnp.zeros(4)})
    first = state["w"]
    for _ in range(3):
        state = step(state, 1.0)
    assert first.is_deleted()
    np.testing.assert_array_equal(state["w"], [12.0] * 4)


@pytest.mark.parametrize("later", ["same step", "another step"])
def test_using_a_donated_value_again_names_the_argument(four, later):
    options = js.RunOptions(donate_argnums=0)

    def step(state, batch):
        return jax.tree.map(lambda a: a + batch, state)

    def look(batch, *, params):
        return params["net"][0]

    state = four.mirror({"net": [jnp.zeros(4)]})
    four.run(step, (state, 1.0), options=options)
    with pytest.raises(
        js.DonatedValueError, match="donated to an earlier call"
    ) as info:
        if later == "same step":
            four.run(step, (state, 1.0), options=options)
        else:
            four.run(look, (1.0,), {"params": state})
    name = "state" if later == "same step" else "params"
    assert f"`{name}['net'][0]`" in str(info.value)


def test_one_array_in_two_donated_places_is_refused(four):
    x = four.mirror(jnp.zeros(3))
    options = js.RunOptions(donate_argnums=0)

    def step(state, other):
        return {key: value + other for key, value in state.items()}

    for _ in range(2):
        words = r"`state\['a'\]` and `state\['b'\]` are one array"
        with pytest.raises(js.DonatedValueError, match=words):
            four.run(step, ({"a": x, "b": x}, 1.0), options=options)
        with pytest.raises(js.DonatedValueError, match=r"`state\['a'\]` and `other`"):
            four.run(step, ({"a": x}, x), options=options)
        fresh = four.mirror(jnp.zeros(3) + 0)
        assert four.run(step, ({"a": fresh}, x), options=options)["a"].shape == (3,)
    assert not x.is_deleted()


def test_donating_a_mirrored_copy_leaves_the_original(strategy):
    original = jax.device_put(jnp.ones(3), jax.devices()[0])
    state = strategy.mirror({"a": original, "b": original})
    options = js.RunOptions(donate_argnums=0)
    strategy.run(lambda s: jax.tree.map(jnp.sin, s), (state,), options=options)
    assert state["a"].is_deleted() and original.tolist() == [1, 1, 1]


def test_a_donated_number_can_be_given_again(four):
    def step(total):
        return total + replica().all_reduce("sum", 1.0)

    for _ in range(3):
        assert four.run(step, (0.0,), options=js.RunOptions(donate_argnums=0)) == 4.0
        assert four.run(step, (0.0,)) == 4.0


def test_zeros_keep_their_sign_and_numbers_their_type(two):
    def step(x):
        return 1.0 / x, x

    for _ in range(2):
        assert two.run(step, (0.0,))[0] == np.inf
        assert two.run(step, (-0.0,))[0] == -np.inf
        assert two.run(step, (1,))[1].dtype == jnp.int32
        assert two.run(step, (1.0,))[1].dtype == jnp.float32
        assert np.isnan(two.run(step, (float("nan"),))[1])


def test_options_of_another_type(two):
    with pytest.raises(TypeError, match="`options` was {'donate': 0}; a `RunOptions`"):
        two.run(lambda: 1.0, options={"donate": 0})


def test_tools_for_finding_errors_work(two):
    x = two.per_replica([1.0, 2.0])

    def step(x):
        return x, replica().all_reduce("sum", x), "text"

    with jax.disable_jit():
        assert two.run(step, (x,))[1] == 3.0
    with jax.checking_leaks():
        assert two.run(step, (x,))[1] == 3.0
    shapes = jax.eval_shape(lambda v: two.run(step, (v,))[:2], x)
    assert shapes[0].shape == () and shapes[1].shape == ()
    compiled = jax.jit(lambda v: two.run(step, (v,))[1]).lower(x).compile()
    assert compiled(x) == 3.0


def test_donated_argument_numbers_are_checked(two):
    with pytest.raises(ValueError, match="names argument 2, but `args` has 1"):
        two.run(lambda a: a, (1.0,), options=js.RunOptions(donate_argnums=2))
    with pytest.raises(ValueError, match="cannot be negative"):
        js.RunOptions(donate_argnums=-1)
    with pytest.raises(TypeError, match="an argument position or a sequence"):
        js.RunOptions(donate_argnums="state")
    assert js.RunOptions(donate_argnums=[1, 0, 1]).donate_argnums == (0, 1)


# Values of another strategy, and values in the wrong form.


def test_a_per_replica_of_another_number_of_replicas(two, four):
    for value in (ids(two), js.PerReplica(np.zeros((8, 3)))):
        with pytest.raises(js.PlacementError, match="`x` is a PerReplica for .* repl"):
            four.run(lambda x: x, (value,))
    with pytest.raises(js.PlacementError, match="`x` is a PerReplica of shape"):
        four.run(lambda x: x, (js.PerReplica(np.float32(1.0)),))


def test_a_per_replica_of_another_number_of_replicas_under_jit(two, four):
    run = jax.jit(lambda v: four.run(lambda x: x, (v,)))
    with pytest.raises(js.PlacementError, match="for 2 replicas.*4 replicas"):
        run(ids(two))


@pytest.mark.parametrize("devices", [slice(4, 8), slice(3, None, -1)])
def test_a_per_replica_of_another_strategy(four, devices):
    other = js.MirroredStrategy(jax.devices()[devices])
    assert other.num_replicas_in_sync == 4

    def step(x):
        return x

    for _ in range(2):  # also when the step has been run with a right one
        with pytest.raises(js.PlacementError, match="`x` is a PerReplica of another"):
            four.run(step, (ids(other),))
        four.run(step, (ids(four),))


def test_a_plain_array_split_over_the_replicas_is_refused(four):
    x = ids(four).stacked

    def step(x):
        return x

    for _ in range(2):  # also when the step has been run with a right one
        with pytest.raises(js.PlacementError, match=r"pass `PerReplica\(array\)`"):
            four.run(step, (x,))
        np.testing.assert_array_equal(four.run(step, (four.mirror(x),)), [0, 1, 2, 3])
        assert versions(four.run(step, (js.PerReplica(x),))) == [0, 1, 2, 3]


def test_a_per_replica_captured_by_the_step_is_refused(four):
    x = ids(four)
    for step in (
        lambda: x + 1,
        lambda: jnp.sin(x),
        lambda: replica().all_reduce("sum", x),
        lambda: replica().all_gather(x, 0),
        lambda: replica().merge_call(lambda s, v: v, (x,)),
        lambda: replica().merge_call(lambda s: s.reduce("sum", x)),
        lambda: replica().merge_call(lambda s: s.run(lambda v: v, (x,))),
        lambda: {"a": x},
    ):
        with pytest.raises(TypeError, match="ass it as an argument"):
            four.run(step)


def test_a_per_replica_around_something_else_is_refused(two):
    with pytest.raises(TypeError, match=r"`x` is a PerReplica around \[1, 2\]"):
        two.run(lambda x: x, (js.PerReplica([1, 2]),))


def test_unhashable_static_arguments_are_refused(two):
    with pytest.raises(TypeError, match=r"`config` is \{1\}, a set.*must be hashable"):
        two.run(lambda x, config: x, (1.0, {1}))
    with pytest.raises(TypeError, match=r"`names` is array\(.*must be hashable"):
        two.run(lambda names: 1.0, (np.array(["a", "b"]),))


# Python asking for values too early.


def if_on_id():
    return 1 if replica().replica_id_in_sync_group == 0 else 2


def if_on_value(x):
    return 1 if x > 0 else 2


def index_list():
    return [1, 2, 3, 4][replica().replica_id_in_sync_group]


def to_numpy(x):
    return np.asarray(x)


def to_float(x):
    return float(x)


@pytest.mark.parametrize(
    "step, args",
    [(if_on_id, ()), (if_on_value, (1.0,)), (index_list, ()), (to_numpy, (1.0,)),
     (to_float, (1.0,))],
)  # fmt: skip
def test_python_cannot_have_the_value_of_a_traced_array(four, step, args):
    with pytest.raises(js.TracedValueError, match="`jax.lax.cond`") as info:
        four.run(step, args)
    source, first = inspect.getsourcelines(step)
    assert f"{__file__}:{first + 1}: {source[1].strip()}" in str(info.value)
    assert "replica_id_in_sync_group" in str(info.value)
    assert isinstance(info.value.__cause__, TypeError)


def test_users_errors_come_through_unchanged(two):
    error = ValueError("mine")

    def step(x):
        raise error

    with pytest.raises(ValueError) as info:
        two.run(step, (jax.device_put(1.0, jax.devices()[5]),))
    assert info.value is error

    def bad_shapes(x):
        return x @ jnp.ones((5, 5))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        two.run(bad_shapes, (jnp.ones((2, 3)),))


def test_a_users_error_runs_the_step_once(two):
    calls = []

    def step(x):
        calls.append(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        two.run(step, (jax.device_put(1.0, jax.devices()[5]),))
    assert calls == [1]


@pytest.mark.parametrize("fn", [None, 3, "step"])
def test_what_cannot_be_called_is_refused(two, fn):
    with pytest.raises(TypeError, match="which cannot be called"):
        two.run(fn, ())


def test_arguments_in_the_wrong_containers_are_refused(two):
    with pytest.raises(TypeError, match=r"Write `args=\(x,\)`"):
        two.run(lambda x: x, jnp.ones(3))
    with pytest.raises(TypeError, match="a dict of the function's keyword"):
        two.run(lambda x: x, (1,), [1])


def test_results_that_may_hide_arrays_are_refused(two):
    with pytest.raises(TypeError, match=r"`step\(\.\.\.\)` is .*a generator"):

        def step(x):
            return (y for y in [x])

        two.run(step, (1.0,))


# As a decorator.


def test_the_decorator_makes_a_step(four):
    @four.run
    def step(state, x, *, scale=1.0):
        """Adds up."""
        return state + scale * replica().all_reduce("sum", x)

    assert step(1.0, ids(four)) == 7.0
    assert step(1.0, x=ids(four), scale=2.0) == 13.0
    assert (step.__name__, step.__doc__) == ("step", "Adds up.")
    assert list(inspect.signature(step).parameters) == ["state", "x", "scale"]
    assert repr(step).endswith(
        "step replicated by MirroredStrategy(4 replicas on cpu:0..3)>"
    )


def test_the_decorator_with_options_and_on_functions_without_parameters(two):
    @two.run(options=js.RunOptions(donate_argnums=(0,)))
    def step(state):
        return state + 1

    state = two.mirror(jnp.zeros(2))
    step(state)
    assert state.is_deleted()

    @two.run()
    def nothing_required(x=2.0):
        return replica().all_reduce("sum", x)

    assert nothing_required() == 4.0
    assert nothing_required(3.0) == 6.0


def test_run_of_a_function_without_required_parameters_runs_it(two):
    def step(x=2.0):
        return replica().all_reduce("sum", x)

    assert two.run(step) == 4.0
    assert two.run(lambda *args, **kwargs: len(args)) == 0
    assert two.run(functools.partial(lambda x: x + 1, 1.0)) == 2.0
    assert callable(two.run(lambda x: x)) and two.run(lambda x: x, (1.0,)) == 1.0
    with pytest.raises(TypeError, match="missing 1 required"):
        two.run(lambda x: x, kwargs={})


class Trainer:
    traces = 0

    def __init__(self, rate):
        self.rate = rate

    def step(self, x):
        Trainer.traces += 1
        return x * self.rate


def test_methods_are_steps_of_their_object(two):
    class Decorated(Trainer):
        step = two.run(Trainer.step)

    Trainer.traces = 0
    a, b = Decorated(2.0), Decorated(3.0)
    for _ in range(3):
        assert (a.step(1.0), b.step(1.0)) == (2.0, 3.0)
    assert Trainer.traces == 2
    alive = weakref.ref(a)
    del a
    gc.collect()
    assert alive() is None


def test_bound_methods_are_traced_once_per_object(two):
    Trainer.traces = 0
    a = Trainer(2.0)
    for _ in range(3):
        assert two.run(a.step, (1.0,)) == 2.0
    assert Trainer.traces == 1


def test_a_method_of_a_pytree_gets_it_as_an_argument(two):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        w: jax.Array

        @two.run
        def scaled(self, x):
            return self.w * replica().all_reduce("sum", x)

    assert Model(jnp.float32(3.0)).scaled(1.0) == 6.0
    assert Model(jnp.float32(4.0)).scaled(1.0) == 8.0


def test_callable_objects_and_partials_are_steps(two):
    class Callable:
        def __call__(self, x):
            return x + 1

    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return x + 2

    assert two.run(Callable(), (1.0,)) == 2.0
    assert two.run(Slotted(), (1.0,)) == 3.0
    assert two.run(functools.partial(lambda x, y: x + y, 5.0), (1.0,)) == 6.0
    assert two.run(jnp.sin, (0.0,)) == 0.0
    assert two.run(jax.jit(lambda x: x + 4), (1.0,)) == 5.0


def test_a_cell_that_is_run_twice(two):
    cell = """
@two.run
def step(x):
    return x + {n}
"""
    for n in (1, 2, 1, 1, 1, 1, 1, 1, 1):
        scope = {"two": two}
        exec(compile(cell.format(n=n), f"<cell {n}>", "exec"), scope)
        assert scope["step"](1.0) == 1.0 + n


def test_a_step_inside_another_steps_run_is_an_error(two):
    @two.run
    def step(x):
        return x

    with pytest.raises(js.ContextError, match="was called inside `run`"):
        two.run(lambda: step(1.0))


# Compiled again and again.


def warned(recwarn):
    found = [w for w in recwarn if w.category is js.RecompilationWarning]
    assert len(found) <= 1, [str(w.message) for w in found]
    return str(found[0].message) if found else None


@pytest.fixture
def warnings_are_kept():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_a_new_lambda_each_time_gives_one_warning(two, warnings_are_kept, recwarn):
    for i in range(20):
        two.run(lambda x: x + i, (1.0,))  # noqa: B023
    text = warned(recwarn)
    assert "compiled for the 3rd time" in text and "new function object" in text
    (warning,) = [w for w in recwarn if w.category is js.RecompilationWarning]
    assert warning.filename == __file__


def test_a_changing_static_argument_gives_one_warning(two, warnings_are_kept, recwarn):
    def step(x, mode):
        return x

    for i in range(20):
        two.run(step, (1.0, f"mode {i}"))
    assert "static argument `mode` changed: it was 'mode 4', is 'mode 5'" in warned(
        recwarn
    )


def test_a_changing_shape_gives_one_warning(two, warnings_are_kept, recwarn):
    def step(batch):
        return batch["x"] * 2

    for i in range(1, 20):
        two.run(step, ({"x": jnp.ones((i, 2))},))
    assert (
        "shape or dtype of `batch['x']` changed: it was float32[5,2], is float32[6,2]"
        in warned(recwarn)
    )


def test_a_changing_structure_gives_one_warning(two, warnings_are_kept, recwarn):
    def step(batch):
        return 1.0

    for i in range(20):
        two.run(step, ({f"key{i}": 1.0},))
    assert "structure of its arguments changed" in warned(recwarn)


def test_functions_and_shapes_that_were_worth_compiling_give_no_warning(two, recwarn):
    def make(rate):
        return lambda x: x * rate

    for rate in range(8):
        step = make(rate)
        for _ in range(10):
            two.run(step, (jnp.ones(rate + 1),))
    assert warned(recwarn) is None


def test_a_few_shapes_and_internal_programs_give_no_warning(two, recwarn):
    def step(x):
        return x * 2

    for n in (1, 2, 3, 4, 5):
        two.run(step, (jnp.ones(n),))
    for n in range(1, 12):
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
