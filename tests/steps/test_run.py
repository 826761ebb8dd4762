"""`strategy.run`: arguments, results, decorators, values asked for too early."""

import collections
import dataclasses
import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import Named, ids, replica, versions

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


def test_what_cannot_be_called_is_refused(two):
    for fn in (None, 3, "step"):
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


def test_run_of_a_function_without_parameters_runs_it(two):
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
