"""Changing variables: parts, rows, what assigning takes and returns; comparisons."""

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.variables import copies, variable

import jaxstrategy as js


def replica_id():
    return js.get_replica_context().replica_id_in_sync_group


@each_of("kind", ["auto", "on_read"])
def test_comparing_with_a_value_compares_values(two, kind):
    v = variable(two, [1.0, 3.0], kind, "mean")
    assert (v == 3.0).tolist() == (3.0 == v).tolist() == [False, True]
    assert (v != 3.0).tolist() == (np.float32(3) != v).tolist() == [True, False]
    for same in ([1.0, 3.0], (1.0, 3.0), np.array([1, 3]), jnp.array([1.0, 3.0])):
        assert (v == same).all() and not (v != same).any()
    assert (v == None) is False and (v != None) is True  # noqa: E711
    assert (v == "3.0") is False and (v != "3.0") is True


def test_variables_are_found_in_containers_by_identity(two):
    v, w = variable(two, [1.0, 2.0]), variable(two, [1.0, 2.0])
    assert v in [w, v] and {v: "v", w: "w"}[v] == "v" and len({v, w, v}) == 2
    assert [w, v].index(v) == 1 and (v == w) is False and (v != w) is True


def test_names_of_tensorflow(two):
    v, w = variable(two, 1.0), js.Variable(1.0)
    assert v.distribute_strategy is v.strategy is two and w.distribute_strategy is None
    assert v.device == two.devices[0] and w.device == jax.devices()[0]
    assert callable(v.value) and v.value() == v.read_value() == 1.0


def test_variables_of_strategies_are_distributed_values(two):
    v, o, w = variable(two, 1.0), variable(two, 1.0, "on_read"), js.Variable(1.0)
    assert isinstance(v, js.DistributedValues) and isinstance(o, js.DistributedValues)
    assert isinstance(v, js.Mirrored) and not isinstance(o, js.Mirrored)
    assert not isinstance(w, (js.DistributedValues, js.Mirrored))
    assert issubclass(js.Variable, js.DistributedValues)


def test_a_variable_in_another_strategys_scope_is_refused(two, four):
    v, w = variable(two, 1.0, name="v"), js.Variable(1.0)
    uses = (v.value, lambda: v.assign(2.0), lambda: v + 1, lambda: v == 1, v.numpy)
    with four.scope():
        for use in uses:
            with pytest.raises(
                js.errors.ContextError, match="'v' belongs to .*in the scope of"
            ):
                use()
        assert w.assign_add(1.0) == 2.0
    with two.scope():
        assert v == 1.0


@each_of("kind", ["auto", "on_read"])
def test_a_copy_belongs_to_its_variable(two, kind):
    v = variable(two, [1.0, 2.0], kind, "sum")
    container = two.extended.value_container
    parts = two.experimental_local_results({"v": [v]})
    for part in [*two.experimental_local_results(v), *(p["v"][0] for p in parts)]:
        assert container(part) is v
        found = two.experimental_local_results(container(part))
        assert any(part is each for each in found)
    scalar = variable(two, 1.0)
    first = two.experimental_local_results(scalar)[0]
    assert first in two.experimental_local_results(container(first))
    scalar.assign(3.0)
    assert container(first) is scalar and first == 1.0
    assert copies(two, scalar) == [3, 3]
    for other in (jnp.ones(2), v.distributed(), 3.0, None, "text"):
        assert container(other) is other
    dropped = two.experimental_local_results(variable(two, 1.0))[0]
    gc.collect()
    assert container(dropped) is dropped


@each_of("kind", ["auto", "on_read"])
def test_assigning_takes_tensorflows_arguments(two, kind):
    v = variable(two, 1.0, kind, "mean")
    assert v.assign(2.0, True, "name", True) == 2.0
    assert v.assign_add(1.0, use_locking=False, name="name", read_value=False) is None
    assert v.assign_sub(2.0, read_value=False) is None and v == 1.0
    assert two.run(lambda: v.assign(4.0, read_value=False)) is None and v == 4.0


INDICES = {
    "slice": np.s_[1:3],
    "number": np.s_[1],
    "negative": np.s_[-1],
    "step": np.s_[::2],
    "two": np.s_[0:2, 1],
    "all": np.s_[...],
    "array": np.array([2, 0]),
    "arrays apart": (np.array([0, 1]), slice(None), np.array([1, 0])),
    "mask": np.array([True, False, True]),
    "new": np.s_[None, 1],
}


@pytest.mark.slow
@each_of("kind", ["auto", "on_read"])
def test_parts_are_assigned_as_in_numpy(two, kind):
    start = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    v = variable(two, start, kind, "mean")
    hows = itertools.cycle(["assign", "assign_add", "assign_sub"])
    for index, how in zip(INDICES.values(), hows, strict=False):
        wanted = start.copy()
        value = 1 + np.arange(wanted[index].size, dtype=np.float32)
        value = value.reshape(wanted[index].shape)
        if how == "assign":
            wanted[index] = value
        else:
            wanted[index] += value if how == "assign_add" else -value
        v.assign(start)
        assert np.array_equal(v[index], start[index])
        assert np.array_equal(getattr(v[index], how)(value), wanted)
        assert copies(two, v) == [wanted.tolist()] * 2


def test_a_part_stands_for_its_value(two):
    v = variable(two, [1.0, 2.0, 3.0])
    part = v[1:]
    assert (part + 1).tolist() == [3, 4] and jnp.sum(part) == part.sum() == 5
    assert part.shape == (2,) and part.dtype == "float32" and len(part) == 2
    assert part[0] == 2 and (part == [2, 3]).all() and not (part != [2, 3]).any()
    assert repr(part) == "Array([2., 3.], dtype=float32)" and float(v[2]) == 3
    assert jnp.stack([v[0], v[1]]).tolist() == np.add(part, [-1, -1]).tolist() == [1, 2]
    assert jax.jit(lambda x: x * 2)(part).tolist() == [4, 6]
    assert isinstance(jax.tree.leaves([part])[0], jax.Array)
    with pytest.raises(TypeError, match="unhashable"):
        hash(part)
    with pytest.raises(AttributeError, match="no_such"):
        part.no_such  # noqa: B018


@each_of("aggregation", ["none", "sum", "mean"])
def test_parts_in_a_step_ignore_the_aggregation(two, aggregation):
    v = variable(two, [1.0, 2.0, 3.0], aggregation=aggregation, name="v")
    assert two.run(lambda: v[0:2].assign(9.0)).tolist() == [9, 9, 3]
    x = two.per_replica(np.float32([1, 2]))
    with pytest.raises(ValueError, match="Variable 'v' is mirrored, but .* may differ"):
        two.run(lambda x: v[0].assign(x), (x,))
    assert copies(two, v) == [[9, 9, 3]] * 2


def test_parts_of_on_read_sums_outside_of_a_step(two):
    o = variable(two, [1.0, 2.0], "on_read", "sum")
    assert o[1].assign(6.0).tolist() == [2, 6] and copies(two, o) == [[1, 3], [1, 3]]
    o[0].assign_add(4.0)  # the first copy takes it
    assert copies(two, o) == [[5, 3], [1, 3]]
    o[:1].assign(two.per_replica(np.float32([[7], [8]])))
    assert copies(two, o) == [[7, 3], [8, 3]]
    n = variable(two, [1.0, 2.0], "on_read")
    with pytest.raises(ValueError, match="aggregation NONE, so it has no value"):
        n[0].assign(1.0)


# Rows. TensorFlow's numbers: [2, 4, 8], two replicas, replica r writes (r + 1, r + 2)
# to the rows (r, r + 1).

SCATTERED = {
    ("add", "sum"): [3, 8, 11],
    ("add", "mean"): [2.5, 6, 9.5],
    ("add", "only_first_replica"): [3, 6, 8],
    ("sub", "sum"): [1, 0, 5],
    ("sub", "mean"): [1.5, 2, 6.5],
    ("sub", "only_first_replica"): [1, 2, 8],
    ("mul", "sum"): [2, 16, 24],
    ("mul", "mean"): [1, 4, 12],
    ("mul", "only_first_replica"): [2, 8, 8],
    ("div", "sum"): [2, 1, 8 / 3],
    ("div", "mean"): [4, 4, 8 / 1.5],
    ("div", "only_first_replica"): [2, 2, 8],
    ("min", "only_first_replica"): [1, 2, 8],
    ("max", "only_first_replica"): [2, 4, 8],
    ("update", "only_first_replica"): [1, 2, 8],
}


@pytest.mark.slow
def test_scattered_rows_of_all_replicas(two):
    each = {
        (how, aggregation): variable(two, [2.0, 4.0, 8.0], aggregation=aggregation)
        for how, aggregation in SCATTERED
    }

    def step():
        first = replica_id() + jnp.arange(2)
        rows = js.IndexedSlices(first + 1.0, first)
        return [getattr(v, f"scatter_{how}")(rows) for (how, _), v in each.items()]

    for (case, v), new in zip(each.items(), two.run(step), strict=True):
        assert isinstance(new, jax.Array)  # equal on all replicas
        np.testing.assert_allclose(new, SCATTERED[case], rtol=1e-6)
        np.testing.assert_allclose(copies(two, v), [SCATTERED[case]] * 2, 1e-6)


ONCE = {"add": 7, "sub": 1, "mul": 12, "div": 4 / 3, "min": 3, "max": 4, "update": 3}


@pytest.mark.slow
@each_of("where", ["outside", "merge_call", "update"])
def test_outside_of_replicas_rows_count_once(two, where):
    rows = js.IndexedSlices(jnp.array([3.0]), jnp.array([1]))
    changed = {
        (how, aggregation): variable(two, [2.0, 4.0, 8.0], aggregation=aggregation)
        for how in ONCE
        for aggregation in ("none", "sum", "mean", "only_first_replica")
        if how not in ("min", "max", "update") or aggregation not in ("sum", "mean")
    }

    def change(*_):
        for (how, _), v in changed.items():
            getattr(v, f"scatter_{how}")(rows)

    if where == "outside":
        change()
    elif where == "update":
        two.extended.update(next(iter(changed.values())), change)
    else:
        two.run(lambda: js.get_replica_context().merge_call(change))
    for (how, _), v in changed.items():
        np.testing.assert_allclose(copies(two, v), [[2, ONCE[how], 8]] * 2, rtol=1e-6)


@each_of("how", ONCE)
def test_scatters_that_are_not_defined(two, how):
    rows = js.IndexedSlices(jnp.array([3.0]), jnp.array([1]))
    each = {"copy per replica": variable(two, [2.0, 4.0], "on_read", "sum", name="v")}
    if how in ("min", "max", "update"):
        each["aggregation MEAN"] = variable(two, [2.0, 4.0], "auto", "mean", name="v")
    for reason, v in each.items():
        refused = f"`scatter_{how}` is not defined for variable 'v'.*{reason}"
        with pytest.raises(NotImplementedError, match=refused):
            getattr(v, f"scatter_{how}")(rows)
        with pytest.raises(NotImplementedError, match=refused):
            two.run(lambda v=v: getattr(v, f"scatter_{how}")(rows), ())


def test_rows_that_differ_need_an_aggregation(two):
    v = variable(two, [2.0, 4.0, 8.0], name="v")

    def step():
        return v.scatter_min(js.IndexedSlices(jnp.ones(1), replica_id()[None]))

    with pytest.raises(ValueError, match="'v' is mirrored, but `step` assigns it"):
        two.run(step)
    same = js.IndexedSlices(jnp.ones(1), jnp.array([1]))
    assert two.run(lambda: v.scatter_max(same)).tolist() == [2, 4, 8]


@pytest.mark.slow
def test_scatters_of_whole_numbers_and_rows_of_vectors(two):
    v = variable(two, np.array([[7, -7], [1, 2]]), aggregation="sum")
    v.scatter_div(js.IndexedSlices(jnp.array([[2, 2]]), jnp.array([0])))
    assert v.numpy().tolist() == [[3, -3], [1, 2]]  # as C divides, and TensorFlow
    v.scatter_add(js.IndexedSlices(jnp.array([[1, 2], [3, 4]]), jnp.array([1, 1])))
    assert v.numpy().tolist() == [[3, -3], [5, 8]] and v.dtype == "int32"
    w = variable(two, np.zeros(3, np.int32), aggregation="sum")

    def step():  # values and indices r, r + 1
        first = replica_id() + jnp.arange(2)
        return w.scatter_add(js.IndexedSlices(first, first))

    assert two.run(step).tolist() == [0, 2, 2]


def test_what_is_no_rows(two):
    v = variable(two, [1.0, 2.0], name="v")
    with pytest.raises(TypeError, match="`scatter_add` of variable 'v' was given 3.0"):
        v.scatter_add(3.0)
    wrong = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))
    with pytest.raises(ValueError, match="has shape"):
        v.scatter_mul(wrong)
    spread = js.IndexedSlices(two.per_replica(np.ones((2, 1))), jnp.array([0]))
    with pytest.raises(ValueError, match="rows that differ between replicas"):
        v.scatter_update(spread)
