"""What each kind of variable holds after each assignment, as TensorFlow recorded it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.oracle import recorded
from helpers.replicas import ids
from helpers.variables import copies, variable

import jaxstrategy as js

ORACLE = recorded("variables.json")


def deviation(row):
    """What we do instead of TensorFlow in this row, or None: error text or copies."""
    kind, aggregation = row["synchronization"], row["aggregation"]
    op, context = row["op"], row["context"]
    match kind, aggregation, op, context:
        case "AUTO", "NONE", _, "replica":
            # There the copies drift apart.
            return r"is mirrored, but .* assigns it a value that may differ[\s\S]*x\.py"
        case "AUTO", _, _, "cross_per_replica":
            # There the copies drift apart, whatever the aggregation.
            return "was given a PerReplica outside `run`"
        case "ON_READ", _, _, "cross_per_replica":
            # There an AttributeError or TypeError by accident, or the one below.
            return {"assign": [1, 2], "assign_add": [11, 12], "assign_sub": [9, 8]}[op]
        case "ON_READ", "SUM", "assign_add" | "assign_sub", "cross":
            # There an error. The aggregate changes by 4: the first copy takes it.
            return [14, 10] if op == "assign_add" else [6, 10]
        case "ON_READ", "NONE", _, "cross":
            # There too, in other words; and its `assign` has changed the copies.
            return "aggregation NONE, so `.*` outside `run` does not say which"
    return None


def change(strategy, v, op, context):
    """Make the call of a row of the table."""
    if context == "replica":
        # A file of its own: errors are to name the line.
        code = compile("lambda x: getattr(v, op)(x + 1)", "x.py", "eval")
        strategy.run(eval(code, {"v": v, "op": op}), (ids(strategy),))
    elif context == "cross":
        getattr(v, op)(4.0)
    elif context == "update":
        strategy.extended.update(v, lambda v: getattr(v, op)(4.0))
    else:
        getattr(v, op)(ids(strategy, 1.0))


@each_of("row", ORACLE["variables"])
def test_the_table_is_tensorflows(two, row):
    v = variable(two, row["start"], row["synchronization"], row["aggregation"])
    ours = deviation(row)
    if isinstance(ours, str):
        with pytest.raises(ValueError, match=ours):
            change(two, v, row["op"], row["context"])
        assert copies(two, v) == [row["start"]] * 2
        return
    change(two, v, row["op"], row["context"])
    expected = row["copies"] if ours is None else ours
    assert copies(two, v) == expected
    if ours is None and not isinstance(row["read"], str):
        assert v.value() == v.read_value() == row["read"]
    if row["synchronization"] == "ON_READ" and row["aggregation"] == "NONE":
        with pytest.raises(ValueError, match="no value outside `run`"):
            v.read_value()


def reduced(strategy, op, where, x):
    if where == "reduce":
        return strategy.reduce(op, x)
    return strategy.run(lambda x: js.get_replica_context().all_reduce(op, x), (x,))


@pytest.mark.slow
@each_of("row", ORACLE["reductions"])
def test_reductions_are_tensorflows(two, row):
    dtype = jnp.dtype(row["dtype"])
    if dtype.itemsize == 8 and dtype.kind in "iu":
        dtype = jnp.dtype("int32")  # 64-bit types are off in JAX
    values = [complex(v) if dtype.kind == "c" else eval(v) for v in row["values"]]
    x = two.per_replica([np.asarray(v).astype(dtype) for v in values])
    if dtype.kind == "b":
        with pytest.raises(TypeError, match="of a bool array is not defined"):
            reduced(two, row["op"], row["where"], x)
        return
    out = reduced(two, row["op"], row["where"], x)
    if dtype == np.uint8:
        # There the mean is that of the wrapped sum, and `all_reduce` is an error.
        assert out == (44 if row["op"] == "SUM" else 150)
    elif dtype.kind == "c":
        # There `all_reduce` is an error.
        assert out == sum(values) / (1 if row["op"] == "SUM" else 2)
    else:
        assert out == float(row["result"])
    is_mean = row["op"] == "MEAN" and dtype.kind in "iu"
    assert out.dtype == (jnp.dtype("float32") if is_mean else dtype)


# The same with any number of replicas; NumPy is the oracle.


def test_what_is_equal_on_all_replicas_may_be_assigned_without_aggregation(strategy):
    v = variable(strategy, np.zeros(2))
    out = strategy.run(
        lambda x: v.assign(js.get_replica_context().all_reduce("sum", x) + v),
        (js.PerReplica(np.ones((strategy.num_replicas_in_sync, 2), np.float32)),),
    )
    assert isinstance(out, js.Mirrored)
    assert v.numpy().tolist() == [strategy.num_replicas_in_sync] * 2


@pytest.mark.slow
@each_of("whole", [0, 7, -7, 8, 1_000_003])
def test_integer_shares_read_back_exactly(strategy, whole):
    v = variable(strategy, 0, "on_read", "sum")
    assert v.assign(whole) == v.value() == whole
    shares = copies(strategy, v)
    assert sum(shares) == whole and len(set(shares[1:])) <= 1
    strategy.extended.update(v, lambda v: v.assign(1))
    assert v.value() == strategy.num_replicas_in_sync


@pytest.mark.slow
@each_of("kind", ["auto", "on_read"])
def test_dtypes_and_shapes(two, kind):
    start = np.array([[0, 1, 0], [1, 1, 0]])
    each = {}
    for dtype in ("float32", "bfloat16", "int32", "bool", "complex64"):
        how = "only_first_replica" if dtype == "bool" else "sum"
        v = variable(two, start.astype(jnp.dtype(dtype)), kind, how)
        assert v.dtype == dtype and v.shape == (2, 3) and v.ndim == 2 and v.size == 6
        each[dtype] = v

    def step(values):
        before = {dtype: v.value() for dtype, v in each.items()}
        for dtype, v in each.items():
            v.assign(values[dtype])
        return before

    values = {dtype: start.astype(jnp.dtype(dtype)) for dtype in each}
    out = two.run(step, (two.per_replica({d: [v, v] for d, v in values.items()}),))
    for dtype, v in each.items():
        assert out[dtype].dtype == v.value().dtype == dtype
        value = values[dtype]
        expected = value if dtype == "bool" else value + value
        np.testing.assert_array_equal(v.numpy(), expected)


def test_random_keys(two):
    key = variable(two, jax.random.key(0))
    own = variable(two, jax.random.key(0), "on_read", "only_first_replica")

    def step():
        key.assign(jax.random.split(key.value())[0])
        changed = own.assign(js.get_replica_context().fold_in(own.value()))
        return changed.dtype == key.dtype

    assert two.run(step)
    data = jax.random.key_data(jax.random.split(jax.random.key(0))[0]).tolist()
    assert jax.random.key_data(key.value()).tolist() == data
    assert len({repr(k) for k in two.experimental_local_results(own)}) == 2
    assert f": [{data[0]}," in repr(key) and "key<fry>[]" in repr(key)
    key.assign(jax.random.key(3))
    assert jax.random.key_data(key.value()).tolist() == [0, 3]
    for other, dtype in ((1.0, "float32"), (np.zeros(2, np.uint32), "uint32")):
        with pytest.raises(TypeError, match=f"holds key<fry> and was given {dtype}"):
            key.assign(other)


@each_of("aggregation, assigned, added", [
    ("none", 5, 15), ("mean", 5, 15), ("only_first_replica", 5, 15), ("sum", 10, 20),
])  # fmt: skip
def test_a_constant_of_the_step(two, aggregation, assigned, added):
    v = variable(two, 10.0, aggregation=aggregation)
    two.run(lambda: v.assign_add(jnp.float32(5)))
    assert copies(two, v) == [added] * 2
    two.run(lambda: v.assign(jnp.float32(5)))
    assert copies(two, v) == [assigned] * 2
