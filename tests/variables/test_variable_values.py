"""Values that are assigned to variables, and variables that stand for their values."""

import copy
import gc
import itertools
import operator
import pickle
import weakref
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids
from helpers.variables import copies, variable

import jaxstrategy as js

# What would make the copies of a mirrored variable drift apart.


def drifts(strategy, step, words, name="v"):
    pattern = rf"Variable '{name}' is mirrored, but `.*` assigns it a [\s\S]*{words}"
    with pytest.raises(ValueError, match=pattern):
        strategy.run(step, (ids(strategy),))


def test_a_branch_that_only_some_replicas_take(two):
    v = variable(two, name="v")

    def step(x):
        jax.lax.cond(x > 0, lambda: v.assign(1.0), lambda: v.value())

    drifts(two, step, r"varies since: .*cond\(x > 0.*\n.*from argument `x`, a PerRep")


def test_a_value_that_varies_since_an_on_read_variable(two):
    v, o = variable(two, name="v"), variable(two, 1.0, "on_read", name="o")
    words = r"v\.assign\(o\.value\(\)\).*\n.*from variable 'o', which has a copy per"
    drifts(two, lambda x: v.assign(o.value()), words)


def test_an_aggregated_assign_that_only_some_replicas_reach(two):
    v = variable(two, aggregation="mean")

    def step(x):
        jax.lax.cond(x > 0, lambda: v.assign(x), lambda: v.value())

    with pytest.raises(
        js.errors.DivergentCollectiveError, match="`cond` whose predicate may"
    ):
        two.run(step, (ids(two),))
    assert v.value() == 10


@pytest.mark.slow
@each_of("kind", ["auto", "on_read"])
@each_of("where", ["outside", "step"])
@each_of(
    "value, error, words",
    [(np.zeros(3), ValueError, r"'v' has shape \(2,\) and was given \(3,\)"),
     (1.0, ValueError, r"shape \(2,\) and was given \(\)\. Assign a value of its own"),
     (np.ones(2, np.complex64), TypeError, "holds float32 and was given complex64"),
     (1j, TypeError, r"was given complex64, .* Convert it: `value.astype\('float32"),
     ("text", TypeError, "text")])  # fmt: skip
def test_values_that_do_not_fit(two, kind, where, value, error, words):
    v = variable(two, np.zeros(2), kind, name="v", aggregation="mean")
    for op in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(error, match=words):
            if where == "outside":
                getattr(v, op)(value)
            else:
                two.run(lambda op=op: getattr(v, op)(value), ())
    assert v.numpy().tolist() == [0, 0]


def test_a_per_replica_value_of_another_number_of_replicas(two, four):
    v = variable(two, 0.0, "on_read")
    with pytest.raises(ValueError, match=r"has shape \(2,\) and was given \(4,\)"):
        v.assign(ids(four))


def test_dtypes_that_would_lose_something():
    v = js.Variable(1)
    with pytest.raises(TypeError, match="holds int32 and was given float32"):
        v.assign(1.0)
    v = js.Variable(1.0, dtype="bfloat16")
    with pytest.raises(TypeError, match="holds bfloat16 and was given float32"):
        v.assign(np.float32(1.0))
    assert v.assign(1.5) == 1.5 and v.assign(2) == 2 and v.assign(True) == 1
    assert v.dtype == v.value().dtype == "bfloat16"


@each_of("kind", ["auto", "on_read"])
def test_values_from_other_devices(two, four, kind):
    v = variable(two, 1.0, kind, "sum")
    elsewhere = jax.device_put(2.0, jax.devices()[7])
    assert v.assign(four.mirror(4.0)) == 4 and v.assign_add(elsewhere) == 6
    w = js.Variable(1.0)
    assert w.assign_add(v.value()) == 7 and v.assign_sub(w) == -1
    if kind == "on_read":
        on_one = js.PerReplica(jax.device_put(np.ones(2, "f"), jax.devices()[6]))
        assert v.assign_add(on_one) == 1 and v.assign(on_one) == 2
    assert set(v.value().devices()) == set(two.devices)


@pytest.mark.slow
@each_of("kind", ["auto", "on_read", "ordinary"])
def test_arrays_given_and_read_before_stay_as_they_are(two, kind):
    given = two.mirror(jnp.arange(3.0))
    v = js.Variable(given) if kind == "ordinary" else variable(two, given, kind, "mean")
    read = [v.value(), v.distributed()] if kind == "auto" else [v.value()]
    if kind == "ordinary":
        given = jnp.arange(3.0)
    read += [v.assign(given), v.assign_add(jnp.zeros(3)), v.numpy()]

    def step():
        v.assign_add(jnp.ones(3))

    two.run(step)
    v.assign_add(jnp.ones(3))
    two.run(step)
    assert v.numpy().tolist() == [3, 4, 5]
    for array in (given, *read):
        assert np.asarray(array).tolist() == [0, 1, 2]


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.mod]
BINARY += [operator.floordiv, operator.pow, operator.lt, operator.le, operator.gt]
BINARY += [operator.ge, divmod]


@pytest.mark.slow
@each_of("function", BINARY)
def test_arithmetic_is_that_of_the_value(two, function):
    a, b = np.float32([7, 5]), np.float32([2, 3])
    v, expected = variable(two, a), function(a, b)
    left, right = js.Variable(a), js.Variable(b)
    for out in (
        function(v, b),
        function(a, right),
        function(v, jnp.asarray(b)),
        function(left, right),
    ):
        np.testing.assert_allclose(out, expected)
        assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(out))
    np.testing.assert_allclose(function(2, v), function(2, a))
    np.testing.assert_allclose(function(v, 2), function(a, 2))


@each_of("name", ["and_", "or_", "xor", "lshift", "rshift"])
def test_arithmetic_of_bits(name):
    function = getattr(operator, name)
    v = js.Variable(6)
    assert function(v, 3) == function(6, 3) and function(3, v) == function(3, 6)


@pytest.mark.slow
def test_unary_operators_and_conversions(two):
    v, n = variable(two, -2.25), variable(two, 3)
    assert (-v, +v, abs(v), ~n, round(v, 1)) == (
        2.25,
        -2.25,
        2.25,
        -4,
        np.float32(-2.2),
    )
    assert (float(v), int(v), complex(v), bool(v)) == (-2.25, -2, -2.25 + 0j, True)
    assert f"{v:.1f} {n:03d}" == "-2.2 003" and [5, 6, 7, 8][n] == 8
    m = variable(two, [[1.0, 2.0], [3.0, 4.0]])
    assert (m @ m).tolist() == (m @ np.eye(2) @ m).tolist() == [[7, 10], [15, 22]]
    assert (np.eye(2, dtype="f") @ m).tolist() == [[1, 2], [3, 4]]
    assert len(m) == 2 and [row.tolist() for row in m] == [[1, 2], [3, 4]]
    assert m[1].tolist() == [3, 4] and m[0, 1] == 2 and m[:, 0].tolist() == [1, 3]
    with pytest.raises(TypeError):
        len(v)


@pytest.mark.slow
def test_numpy_and_jax_functions_take_it(two):
    v = variable(two, [1.0, 4.0])
    assert isinstance(v.numpy(), np.ndarray) and v.numpy().tolist() == [1, 4]
    assert np.asarray(v).tolist() == np.array(v, np.float64).tolist() == [1, 4]
    assert np.sqrt(v).tolist() == jnp.sqrt(v).tolist() == [1, 2]
    assert jnp.stack([v, v]).shape == (2, 2) and jnp.array([v, v]).shape == (2, 2)
    assert jnp.concatenate([v[None], v[None]]).shape == (2, 2)
    assert jnp.where(v > 2, v, 0.0).tolist() == [0, 4]
    assert jnp.dot(v, v) == 17 and jnp.sum(v) == 5 and jax.nn.relu(v).shape == (2,)
    assert jax.jit(lambda x: x + 1)(v).tolist() == [2, 5]
    assert jax.vmap(lambda x: 2 * x)(v).tolist() == [2, 8]
    assert jax.grad(lambda x: jnp.sum(x**2))(v).tolist() == [2, 8]


def test_tree_functions_give_arrays(two):
    tree = {"v": variable(two, 2.0), "o": variable(two, 1.0, "on_read", "sum")}
    out = jax.tree.map(lambda x: x * 2, tree)
    assert out == {"v": 4, "o": 4} and isinstance(out["v"], jax.Array)
    assert jax.tree.leaves(tree) == [2, 2]
    # What has no one value is all of its copies.
    (only,) = jax.tree.map(lambda x: x + 1, [variable(two, 1.0, "on_read")])
    assert isinstance(only, js.PerReplica) and only.stacked.tolist() == [2, 2]


def test_how_it_prints(two):
    v = variable(two, [1.5, 2.0], name="v")
    assert (
        repr(v)
        == str(v)
        == f"{v}"
        == "Variable 'v' float32[2] mirrored on 2 replicas: [1.5, 2. ]"
    )
    o = variable(two, 1, "on_read", name="o")
    o.assign(two.per_replica([3, 4]))
    assert repr(o) == "Variable 'o' int32[] on read, {\n  0: 3,\n  1: 4\n}"
    assert repr(js.Variable(True, name="w")) == "<Variable 'w' bool[] True>"
    big = repr(variable(two, np.zeros((100, 100))))
    assert "float32[100,100]" in big and "..., 0., 0., 0.]" in big and len(big) < 1000


def in_notebook(v):
    """Its rows there, or what stands there without a table; and the title."""
    page = ElementTree.fromstring(v._repr_html_())
    rows = [[cell.text for cell in row] for row in page.iter("tr")][1:]
    title, *rest = ("".join(each.itertext()) for each in page.iter("p"))
    return title, rows or [*rest, *(pre.text for pre in page.iter("pre"))]


def test_how_it_looks_in_a_notebook(two):
    v = variable(two, [0.1, 2.0], name="<v>")
    wanted = ["equal on 2 replicas, cpu:0, cpu:1", "[0.1, 2. ]"]
    assert in_notebook(v) == ("Variable <v> float32[2], mirrored", wanted)
    o = variable(two, 1, "on_read", name="o")
    o.assign(two.per_replica([3, 4]))
    copies = [["0", "cpu:0", "3"], ["1", "cpu:1", "4"]]
    assert in_notebook(o) == ("Variable o int32[], on read", copies)
    with two.scope():
        part = js.Variable(np.arange(2, dtype=np.float32), sharding=0, name="p")
    title = "Variable p float32[2], divided along dimension 0"
    copies = [["0", "cpu:0", "[0.]"], ["1", "cpu:1", "[1.]"]]
    assert in_notebook(part) == (title, copies)
    large = variable(two, np.zeros(100), "on_read", name="l")
    assert in_notebook(large)[1][0] == ["0", "cpu:0", "float32[100]"]
    own = js.Variable(0.1, name="w")
    title = "Variable w float32[], of no strategy"
    assert in_notebook(own) == (title, ["on cpu:0", "0.1"])


def test_copies_that_are_out_of_sync_are_printed_each(two):
    v = variable(two, 1.0, name="v")
    sharding = v.sharding
    parts = [jax.device_put(np.float32(i), d) for i, d in enumerate(v.devices)]
    v.cell[...] = jax.make_array_from_single_device_arrays((), sharding, parts)
    assert repr(v) == "Variable 'v' float32[] mirrored, {\n  0: 0.0,\n  1: 1.0\n}"
    assert in_notebook(v)[1] == [["0", "cpu:0", "0.0"], ["1", "cpu:1", "1.0"]]


def test_how_it_prints_while_it_is_traced(two):
    v, o = variable(two, 1.0, name="v"), variable(two, 1.0, "on_read", name="o")
    w = js.Variable(1.0, name="w")
    seen = []

    def look():
        seen.append((repr(v), repr(o), repr(w)))
        return v.value()

    expected = (
        "<Variable 'v' float32[] mirrored, being traced>",
        "<Variable 'o' float32[] on read, being traced>",
    )
    assert two.run(look) == jax.jit(look)() == 1
    assert {each[:2] for each in seen} == {expected}
    assert seen[0][2] == "<Variable 'w' float32[], being traced>"


@each_of("kind", ["auto", "on_read"])
def test_a_deep_copy_is_independent(two, kind):
    v = variable(two, 1.0, kind, name="v", trainable=False)
    if kind == "on_read":
        v.assign(ids(two))
    before = copies(two, v)
    twin = copy.deepcopy([v, v])
    assert twin[0] is twin[1] and twin[0] is not v and twin[0] != v
    twin = twin[0]
    assert (twin.name, twin.trainable, twin.strategy) == ("v", False, two)
    assert (twin.synchronization, twin.dtype) == (v.synchronization, v.dtype)
    two.run(lambda: twin.assign_add(1.0))
    assert copies(two, v) == before
    assert copies(two, twin) == [each + 1 for each in before]
    assert copy.copy(v) is v


def test_a_deep_copy_is_of_the_same_strategy_wherever_it_is_made(two, four):
    v, w = variable(two, 1.0), js.Variable(2.0)
    with four.scope():
        twin, other = copy.deepcopy(v), copy.deepcopy(w)
    assert twin.strategy is two and other.strategy is None and other.value() == 2
    with pytest.raises(js.errors.ContextError, match="was deep-copied inside a step"):
        two.run(lambda: copy.deepcopy(v).value())


def test_pickling_is_refused():
    with pytest.raises(TypeError, match=r"'v' cannot be pickled.*variable\.numpy\(\)"):
        pickle.dumps(js.Variable(1.0, name="v"))


def rows_of(i):
    """Rows (0, i) with values (i + 1) * [[1, 2], [3, 4]]."""
    values = (i + 1.0) * jnp.array([[1.0, 2.0], [3.0, 4.0]])
    return js.IndexedSlices(values, jnp.stack([0 * i, i]), (5, 2))


def test_rows_may_be_assigned_and_added_outside_of_run(two):
    with two.scope():
        v = js.Variable(np.ones((5, 2), np.float32))
    v.assign(rows_of(jnp.int32(1)))
    v.assign_add(rows_of(jnp.int32(1)))
    expected = np.zeros((5, 2), np.float32)
    expected[[0, 1]] = 4 * np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(v.numpy(), expected)


def test_rows_that_differ_are_refused_outside_of_run(two):
    with two.scope():
        v = js.Variable(np.ones((5, 2), np.float32))
    rows = two.run(rows_of, (two.per_replica([0, 1]),))
    with pytest.raises(ValueError, match="given rows that differ between replicas"):
        v.assign_add(rows)


def test_rows_of_an_array_of_another_shape_are_refused(two):
    with two.scope():
        v = js.Variable(np.ones((6, 2), np.float32), name="v")
    with pytest.raises(ValueError, match=r"'v' has shape \(6, 2\) and was given rows"):
        v.assign_add(rows_of(jnp.int32(1)))


# Changing variables: parts, rows, what assigning takes and returns; comparisons.


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


# Variables are updated in place, and their memory is freed.

SHAPE = (100_003,)  # of no array of other tests in this process


def live():
    """The bytes of arrays of this shape."""
    gc.collect()
    shapes = (SHAPE, (2, *SHAPE))
    return sum(a.nbytes for a in jax.live_arrays() if a.shape in shapes)


@pytest.mark.slow
@each_of("kind", ["auto", "on_read"])
def test_a_variable_that_is_dropped_frees_its_memory(two, kind):
    before = live()
    v = variable(two, np.ones(SHAPE), kind, "sum")

    def by_argument(v):
        v.assign_add(np.ones(SHAPE))

    def by_closure(v=v):
        v.assign_add(np.ones(SHAPE))

    two.run(by_argument, (v,))
    two.run(by_closure, ())
    assert live() > before and v.value()[0] > 2
    dropped = weakref.ref(v)
    del v, by_closure
    gc.collect()
    # The step that it was an argument of is still there.
    assert dropped() is None and live() == before
    with two.scope():
        w = js.Variable(np.ones(SHAPE))
    two.run(by_argument, (w,))
    assert w.value()[0] == 2


@each_of("kind", ["auto", "on_read"])
def test_steps_update_in_place(two, kind):
    v = variable(two, np.ones(SHAPE), kind, "mean")

    def step():
        v.assign_add(jnp.ones(SHAPE))

    two.run(step)
    memory = live()
    for _ in range(100):
        two.run(step)
    assert live() == memory and v.value()[0] == 102
    found = two.explain(step).memory
    one = 4 * SHAPE[0]
    assert found.arguments == one and found.donated == one and found.temporary < one
    assert v.value()[0] == 102


def test_reading_costs_no_copy(two):
    v = variable(two, np.ones(SHAPE))
    found = two.explain(lambda: jnp.sum(v.value() * 2)).memory
    argument = two.explain(lambda x: jnp.sum(x * 2), (v.value(),)).memory
    assert found.arguments == argument.arguments == found.donated
    assert found.temporary <= argument.temporary
    before = live()
    two.run(lambda: jnp.sum(v.value() * 2))
    assert live() <= before
