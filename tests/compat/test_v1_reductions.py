"""Values of `compat.v1`, reduced, copied and read: numbers of TensorFlow 2.21."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.first_generation import each, mirrored, of_each_kind, replica_id

import jaxstrategy as js
from jaxstrategy.compat import v1


def per_replica(s):
    """1, 2, ... of the replicas."""
    return s.run(lambda: replica_id() + 1.0)


@of_each_kind
def test_reduce_without_an_axis(make):
    s = make()
    x, n = per_replica(s), s.num_replicas_in_sync
    total = n * (n + 1) / 2
    assert float(s.reduce("SUM", x)) == float(s.reduce("sum", x)) == total
    assert (
        float(s.reduce(v1.ReduceOp.MEAN, x)) == float(s.reduce("Mean", x)) == total / n
    )
    assert float(s.reduce("SUM", 3.0)) == 3 * n


def test_options_by_their_older_name():
    s = mirrored()
    x = per_replica(s)
    hints = v1.experimental.CollectiveHints(bytes_per_pack=1)
    extended = s.extended
    for method, target in (
        (extended.reduce_to, (x, "CPU:0")),
        (extended.batch_reduce_to, ([(x, "CPU:0")],)),
    ):
        for given in (
            {"options": hints},
            {"experimental_hints": hints},
            {"experimental_hints": None},
        ):
            (result,) = jax.tree.leaves(method("sum", *target, **given))
            assert float(result) == 3
        with pytest.raises(ValueError, match="are two names of one argument, and both"):
            method("sum", *target, hints, experimental_hints=hints)
        with pytest.raises(TypeError, match="`experimental_hints` was 3; `experimenta"):
            method("sum", *target, experimental_hints=3)


def test_where_values_are_broadcast_to():
    s = mirrored()
    with s.scope():
        v = js.Variable([1.0, 2.0])
    cpus = jax.devices()
    for given in (np.float32(5), jnp.float32(5)):
        result = s.extended.broadcast_to(given, "CPU:1")
        assert isinstance(result, jax.Array) and result.devices() == {cpus[1]}
        result = s.extended.broadcast_to(given, v)
        assert result.devices() == set(cpus[:2]) and float(result) == 5
        assert isinstance(result, js.Mirrored)
    for several in (["CPU:0", "CPU:1"], ("/device:CPU:0", cpus[1])):
        assert s.extended.broadcast_to(3.0, destinations=several) == 3
        result = s.extended.broadcast_to(np.float32(3), destinations=several)
        assert result.devices() == set(cpus[:2])
    result = s.extended.broadcast_to({"a": np.ones(3)}, per_replica(s))
    assert result["a"].devices() == set(cpus[:2])
    s = mirrored()
    method = s.extended.broadcast_to
    for wrong in (None, [], ()):
        with pytest.raises(ValueError, match="`extended.broadcast_to` was given"):
            method(np.ones(2), wrong)
    with pytest.raises(ValueError, match="`extended.broadcast_to` was given a PerRepl"):
        method(per_replica(s), "CPU:0")
    with pytest.raises(RuntimeError, match="`strategy.extended.broadcast_to` was call"):
        s.run(lambda: method(np.ones(2), "CPU:0"))


def test_reading_on_read_variables():
    s = mirrored()
    with s.scope():
        total = js.Variable(1.0, synchronization="on_read", aggregation="sum")
        mean = js.Variable(4.0, synchronization="on_read", aggregation="mean")
        first = js.Variable(
            0.0, synchronization="on_read", aggregation="only_first_replica"
        )
        none = js.Variable(0.0, synchronization="on_read")

    def step():
        i = replica_id()
        total.assign_add(2.0 + i)
        mean.assign(6.0 * i)
        first.assign(7.0 + i)
        return total.value(), mean.value()

    s.extended.update(total, lambda v: v.assign(1.0))
    own = s.run(step)
    assert each(s, own[0]) == [3, 4] and each(s, own[1]) == [0, 6]
    read = s.extended.read_var
    assert [float(read(v)) for v in (total, mean, first)] == [7, 3, 7]
    with pytest.raises(ValueError, match="aggregation NONE"):
        read(none)
    with pytest.raises(RuntimeError, match="`extended.read_var` was called inside `ru"):
        s.run(lambda: read(total))

    def merged(strategy):
        return strategy.extended.read_var(total)

    assert float(s.run(lambda: v1.get_replica_context().merge_call(merged))) == 7
