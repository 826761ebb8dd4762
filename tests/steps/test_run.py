"""`strategy.run` and `@strategy.step`: arguments, results, what comes back as it is."""

import collections
import dataclasses
import functools
import gc
import inspect
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each, each_of
from helpers.replicas import Named, ids, replica, versions
from helpers.variables import variable

import jaxstrategy as js


def test_per_replica_arguments_are_unwrapped_and_others_are_the_same(four):
    out = four.run(lambda x, k, y: x + 10 * k + y, (ids(four), 2.0), {"y": 0.5})
    assert versions(out) == [20.5, 21.5, 22.5, 23.5]


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


def if_on_id():
    return 1 if replica().replica_id_in_sync_group == 0 else 2


def index_list():
    return [1, 2, 3, 4][replica().replica_id_in_sync_group]


def to_float(x):
    return float(x)


def test_python_cannot_have_the_value_of_a_traced_array(four):
    for step, args in ((if_on_id, ()), (index_list, ()), (to_float, (1.0,))):
        with pytest.raises(js.errors.TracedValueError, match="`jax.lax.cond`") as info:
            four.run(step, args)
        source, first = inspect.getsourcelines(step)
        assert f"{__file__}:{first + 1}: {source[1].strip()}" in str(info.value)
        assert "replica_id_in_sync_group" in str(info.value)
        assert isinstance(info.value.__cause__, TypeError)


def test_users_errors_come_through_unchanged(two):
    error, calls = ValueError("mine"), []

    def step(x):
        calls.append(1)
        raise error

    with pytest.raises(ValueError) as info:
        two.run(step, (jax.device_put(1.0, jax.devices()[5]),))
    assert info.value is error and calls == [1]

    def bad_shapes(x):
        return x @ jnp.ones((5, 5))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        two.run(bad_shapes, (jnp.ones((2, 3)),))


def test_arguments_in_the_wrong_containers_are_refused(two):
    with pytest.raises(TypeError, match=r"Write `args=\(x,\)`"):
        two.run(lambda x: x, jnp.ones(3))
    with pytest.raises(TypeError, match="a dict of the function's keyword"):
        two.run(lambda x: x, (1,), [1])


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


def test_a_step_is_run_as_the_function_that_it_was_made_of(two):
    @two.run(options=js.RunOptions(donate_argnums=0))
    def step(w, x):
        return w - js.get_replica_context().all_reduce("mean", w * x)

    x = two.per_replica([1.0, 2.0])
    given = [two.mirror(4.0) for _ in range(3)]
    assert two.run(step, (given[0], x)) == 4 - (4 + 8) / 2
    assert two.run(step)(given[1], x) == 4 - (4 + 8) / 2
    assert two.step(step)(given[2], x) == 4 - (4 + 8) / 2
    assert all(w.is_deleted() for w in given), "its options count"
    kept = two.mirror(4.0)
    two.run(step, (kept, x), options=js.RunOptions())
    assert not kept.is_deleted()


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


# `@strategy.step`, which makes a step of any function and calls none.


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


# What is no array comes back from `run`, `merge_call` and `update` as itself.


@dataclasses.dataclass
class Config:
    rate: float
    inner: object = None


class Slotted:
    __slots__ = ("empty", "held")

    def __init__(self, held):
        self.held = held


def test_a_step_keeps_no_variable_alive_that_it_returned(two):
    model = {"v": variable(two, 1.0)}

    @two.run
    def step(x):
        return model["v"], x

    first = weakref.ref(model["v"])
    assert step(1.0)[0] is model["v"]
    model["v"] = variable(two, 2.0)
    gc.collect()
    assert first() is None
    assert step(1.0)[0] is model["v"]  # the new one


def test_objects_come_back_as_they_are(two):
    objects = [
        *("text", 3.0, 7, True, None, js.ReduceOp.SUM),
        Config(0.1),
        Slotted("text"),
        {1, 2},
        frozenset("ab"),
        object(),
        np.dtype("int8"),
        Config,
        len,
        functools.partial(max, 3),
        (lambda x: x).__get__(3),
        jax.sharding.PartitionSpec("a"),
        two,
    ]

    def step(x):
        return tuple(objects), {"x": x, "objects": objects}

    for strategy in (two, js.MirroredStrategy(jax.devices()[:1])):
        out, more = strategy.run(step, (1.0,))
        assert all(a is b for a, b in zip(out, objects, strict=True))
        assert more["x"] == 1.0 and more["objects"][0] is objects[0]

    def merge(strategy, x):
        return objects[6], x

    def merged(x):
        return js.get_replica_context().merge_call(merge, (x,))

    assert two.run(merged, (1.0,))[0] is objects[6]
    assert two.extended.update(variable(two, 1.0), lambda v: objects[6]) is objects[6]
    on_read = variable(two, 1.0, "on_read", aggregation="sum")
    assert two.extended.update(on_read, lambda v: objects[7]) is objects[7]


def test_an_object_of_arrays_that_were_there_before_comes_back(two):
    config = Config(0.1, [np.ones(3), jnp.ones(3)])
    assert two.run(lambda: config) is config


HIDING = {
    "attribute": (lambda x: Config(x), r"\.rate"),
    "deep": (lambda x: Config(1.0, [Config(2.0, {"k": (x,)})]), r"\['k'\]\[0\]"),
    "slot": (lambda x: Slotted([x]), r"\.held\[0\]"),
    "function": (lambda x: lambda: x, r"captured as 'x'"),
    "default": (lambda x: lambda y=x: y, r"__defaults__\[0\]"),
    "partial": (lambda x: functools.partial(max, x), r"\.args\[0\]"),
    "method": (lambda x: Config(x).__eq__, r"__self__\.rate"),
}


def test_an_object_that_hides_an_array_of_the_step_is_refused(two):
    for how in each(list(HIDING)):
        make, path = HIDING[how]

        def step(x, make=make):
            return {"a": make(x)}

        words = (
            r"`step\(...\)\['a'\]` is .*holds an array of the step as `step.*" + path
        )
        with pytest.raises(TypeError, match=words):
            two.run(step, (1.0,))


# With one replica nothing is wrapped, and programs go from one to several and back.


@functools.cache
def ones():
    """Strategies of one replica."""
    device = jax.devices()[2]
    return {
        "default": js.get_strategy(),
        "one device": js.OneDeviceStrategy(device),
        "mirrored": js.MirroredStrategy([device]),
        "several processes": js.MultiWorkerMirroredStrategy(
            js.cluster_resolver.SimpleClusterResolver({})
        ),
        "central": js.experimental.CentralStorageStrategy([device], jax.devices()[5]),
    }


NAMES = ["default", "one device", "mirrored", "central"]


def is_plain(value):
    return isinstance(value, jax.Array)


@each_of("name", NAMES)
def test_nothing_is_wrapped(name):
    strategy = ones_of(name)
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {"x": [1.0, 2.0], "flag": True}
    )
    assert is_plain(made["x"]) and is_plain(made["flag"])
    assert (made["x"] + 1).tolist() == [2, 3] and bool(made["flag"])
    x = strategy.per_replica([3.0])
    out = strategy.run(
        lambda x: {"x": x, "id": replica().replica_id_in_sync_group}, (x,)
    )
    assert float(out["x"]) == 3 and int(out["id"]) == 0
    assert f"{out['x'] + 1:.2f}" == "4.00"
    assert strategy.experimental_local_results(out) == ({"x": 3.0, "id": 0},)
    again = strategy.run(lambda x: 2 * x, (out["x"],))
    assert float(again) == 6


def ones_of(name):
    return ones()[name]


@each_of("name", NAMES)
def test_what_is_explicitly_per_replica_stays_so_until_a_step(name):
    strategy = ones_of(name)
    x = strategy.per_replica([3.0])
    assert isinstance(x, js.PerReplica) and x.local(0) == 3
    assert strategy.reduce("sum", x) == 3
    assert strategy.gather(strategy.per_replica([[1, 2]])).tolist() == [1, 2]
    assert float(strategy.run(lambda x: x + 1, (x,))) == 4
    assert float(strategy.run(lambda x: x + 1, (js.PerReplica(np.ones((1,))),))) == 2


@each_of(
    "name, ahead", (("default", 0), ("one device", 2), ("mirrored", 0), ("central", 2))
)
def test_batches_have_the_rows_that_there_are(name, ahead):
    strategy = ones_of(name)
    options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
    rows = [np.arange(4.0), np.arange(5.0, 8.0)]
    for batches in (
        strategy.experimental_distribute_dataset(rows, options),
        strategy.distribute_datasets_from_function(lambda _: rows, options),
    ):
        whole, rest = batches
        assert whole.tolist() == [0, 1, 2, 3] and (rest * 2).tolist() == [10, 12, 14]
        assert strategy.run(js.batch_mask, (rest,)).tolist() == [True] * 3
        assert float(strategy.run(js.masked_mean, (rest,))) == 6
        assert strategy.reduce("mean", rest, axis=0) == 6
        assert strategy.gather(rest).tolist() == [5, 6, 7]
        (own,) = strategy.experimental_local_results(rest)
        assert own.tolist() == [5, 6, 7]


# `to_host`: what was on devices, as NumPy arrays.


def test_every_kind_of_leaf(two):
    with two.scope():
        w = js.Variable([1.0, 2.0])
        seen = js.Variable(3, synchronization="on_read", aggregation="sum")
        own = js.Variable(5, synchronization="on_read")
    two.run(lambda: seen.assign_add(1))
    same, word = np.ones(3), "relu"
    tree = {
        "mirrored": two.mirror(np.float32([1.5, 2.5])),
        "per replica": two.per_replica(np.arange(6).reshape(2, 3)),
        "single": jnp.ones((2, 2)),
        "variables": (w, seen, own),
        "numpy": same,
        "number": 4,
        "word": word,
        "none": None,
        "key": two.mirror(jax.random.key(7)),
    }
    have = js.to_host(tree)
    assert have["numpy"] is same and have["word"] is word
    assert have["number"] == 4 and have["none"] is None
    want = {
        "mirrored": np.float32([1.5, 2.5]),
        "per replica": np.arange(6).reshape(2, 3),
        "single": np.ones((2, 2)),
        "variables": (np.float32([1, 2]), 2 * (3 + 1), np.array([5, 5])),
        "key": np.array([0, 7], np.uint32),
    }
    for name, value in want.items():
        jax.tree.map(np.testing.assert_array_equal, have[name], value)
        assert {type(leaf) for leaf in jax.tree.leaves(have[name])} == {np.ndarray}


def test_inside_a_step_it_is_refused(two):
    message = r"`to_host` was called on `tree\['x'\]` while a function is traced"
    with pytest.raises(js.errors.TracedValueError, match=message):
        two.run(lambda x: js.to_host({"x": x}), (1.0,))


def test_donated_arrays_are_refused(two):
    state = two.mirror({"w": np.ones(4, np.float32)})
    step = two.run(options=js.RunOptions(donate_argnums=0))(lambda s: {"w": s["w"] + 1})
    new = step(state)
    message = r"`tree\['w'\]` was donated to a step, so its memory is gone"
    with pytest.raises(js.errors.DonatedValueError, match=message):
        js.to_host(state)
    np.testing.assert_array_equal(js.to_host(new)["w"], np.full(4, 2.0))


@each_of("num_replicas", (1, 3))
def test_one_device_communicates_with_nobody(num_replicas):
    # XLA keeps collectives of one device, which cost a third of a small step.
    strategy = js.MirroredStrategy(jax.devices()[2:3], num_replicas=num_replicas)

    def step(x):
        context = replica()
        axis = "replica"
        shifts = [(i, (i + 1) % num_replicas) for i in range(num_replicas)]
        return {
            "sum": context.all_reduce("sum", {"x": x, "y": x.astype("int32")}),
            "largest": jax.lax.pmax(x, axis),
            "all": jax.lax.all_gather(x, axis),
            "shifted": jax.lax.ppermute(x, axis, shifts),
            "swapped": jax.lax.all_to_all(
                jax.numpy.tile(x, 3)[:num_replicas], axis, 0, 0
            ),
            "id": jax.lax.axis_index(axis),
        }

    rows = np.arange(2.0 * num_replicas, dtype=np.float32).reshape(num_replicas, 2)
    x = strategy.per_replica(rows)
    text = strategy.compile(step, (x,)).compiled.as_text()
    found = re.findall(r"all-\w+\(|collective-\w+\(|reduce-scatter\(", text)
    assert not found
    out = strategy.run(step, (x,))
    locals_ = strategy.experimental_local_results(out)
    for i, own in enumerate(locals_):
        np.testing.assert_array_equal(own["sum"]["x"], rows.sum(0))
        np.testing.assert_array_equal(own["sum"]["y"], rows.sum(0))
        np.testing.assert_array_equal(own["largest"], rows.max(0))
        np.testing.assert_array_equal(own["all"], rows)
        np.testing.assert_array_equal(own["shifted"], rows[i - 1])
        swapped = np.stack([np.tile(row, 3)[i] for row in rows])
        np.testing.assert_array_equal(own["swapped"], swapped)
        assert own["id"] == i
