"""Values that are assigned to variables, and variables that stand for their values."""

import copy
import operator
import pickle
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
    if kind == "ordinary":
        v = js.Variable(given)
    else:
        v = variable(two, given, kind, "mean")
    if kind == "auto":
        read = [v.value(), v.distributed()]
    else:
        read = [v.value()]
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
