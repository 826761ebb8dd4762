"""Recipes of CONTRIBUTING.md, followed: what they name is all that has to be changed.

Others are held by tests of their own: `test_one_row_per_operation.py` (reduce
operations), `test_exit_code_table.py` (exit codes), `test_checkpoint_parts.py`
(checkpoint backends), `test_cluster_resolver.py` (resolvers).
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from helpers.replicas import replica
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy.inputs.sources import _choose, _plain
from jaxstrategy.profiling import _writers
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.strategies._choices import Choices
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.variables._policy import VariablePolicy
from jaxstrategy.variables.kinds._mirrored_kind import MirroredKind


class Chosen(Strategy):
    """A strategy is its choices."""

    def __init__(self, **choices):
        self._compose(Choices(**choices))


# An inner mesh axis.


def of_two_devices_each():
    """Three replicas on six devices."""
    grid = np.array(jax.devices()[:6]).reshape(3, 2)
    mesh = Mesh(grid, ("replica", "inner"), axis_types=(AxisType.Auto,) * 2)
    return Chosen(replicas=Replicas(mesh))


def test_replicas_of_two_devices_each_give_what_replicas_give():
    strategy = of_two_devices_each()
    assert strategy.num_replicas_in_sync == 3
    with strategy.scope():
        total = js.Variable(1.0, aggregation="mean")
        seen = js.Variable(0, synchronization="on_read", aggregation="sum")

    @strategy.run
    def step(w, x):
        total.assign_add(x.sum())
        seen.assign_add(replica().replica_id_in_sync_group)
        mean = replica().all_reduce("mean", x)
        return w - mean, jax.lax.with_sharding_constraint(x * 2, P("inner"))

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    w, doubled = step(np.zeros(2, np.float32), strategy.per_replica(x))
    np.testing.assert_array_equal(w, -x.mean(0))
    assert isinstance(w, js.Mirrored)
    assert doubled.stacked.sharding.shard_shape((3, 2)) == (1, 1)
    np.testing.assert_array_equal(strategy.gather(doubled), 2 * x.reshape(-1))
    versions = strategy.experimental_local_results(doubled)
    np.testing.assert_array_equal(np.stack(versions), 2 * x)
    np.testing.assert_array_equal(strategy.reduce("max", doubled), [8, 10])
    assert float(total) == 1 + x.sum() / 3 and int(seen) == 0 + 1 + 2
    strategy.assert_in_sync((w, total.value()))


def test_replicas_of_two_devices_each_are_fed():
    strategy = of_two_devices_each()
    rows = np.arange(5, dtype=np.float32)
    (batch,) = strategy.experimental_distribute_dataset([rows])
    np.testing.assert_array_equal(strategy.gather(batch), rows)
    sums = strategy.run(js.masked_sum, (batch,))
    assert float(strategy.reduce("sum", sums)) == rows.sum()


# A kind of variable.


class UpToOne(MirroredKind):  # type: ignore[misc]  # final only for the package
    """Holds numbers from 0 to 1."""

    describe = "up to one"

    def write(self, ref, side, value, change):
        ref[...] = jnp.clip(super().write(ref, side, value, change), 0, 1)
        return ref[...]


class AllUpToOne(VariablePolicy):
    are_owned = True

    def __init__(self, replicas):
        self.each = replicas

    @property
    def replicas(self):
        return self.each

    def kind(self, name, on_read, aggregation, owner):
        return UpToOne(name, aggregation, self.each, owner)


def test_a_policy_chooses_a_kind_of_variable():
    replicas = Replicas.on(jax.devices()[:2])
    strategy = Chosen(replicas=replicas, variables=AllUpToOne(replicas))
    with strategy.scope():
        v = js.Variable(0.5, aggregation="mean")
    assert str(v) == "Variable 'Variable' float32[] up to one on 2 replicas: 0.5"
    strategy.run(v.assign_add, (strategy.per_replica([0.0, 0.5]),))
    assert float(v) == 0.75
    strategy.run(v.assign_add, (strategy.per_replica([3.0, 5.0]),))
    assert float(v) == 1
    v.assign(-1.0)
    assert float(v) == 0
    assert float(strategy.extended.update(v, lambda v: v.assign_add(0.25))) == 0.25


# A source, a writer of metrics.


def test_a_source_is_found_by_its_row(two, monkeypatch):
    class Table:
        def __init__(self, *columns):
            self.columns = columns

    class TableSource(_plain.Repeatable):
        def __init__(self, table):
            super().__init__([np.asarray(column) for column in table.columns])

    library = types.ModuleType("tables")
    library.Table = Table
    monkeypatch.setitem(sys.modules, "tables", library)
    row = ("tables", "Table", TableSource)
    monkeypatch.setattr(_choose, "_LIBRARIES", (row, *_choose._LIBRARIES))
    dataset = two.experimental_distribute_dataset(Table([1, 2], [3, 4]))
    assert [two.gather(batch).tolist() for batch in dataset] == [[1, 2], [3, 4]]


def test_a_writer_is_known_by_its_row(monkeypatch):
    class Run:
        def __init__(self):
            self.told = []

        def record(self, scalars, at):
            self.told.append((at, scalars))

    def as_write(record):
        return lambda step, scalars: record(scalars, at=step)

    monkeypatch.setitem(_writers._METHODS, "record", ("(scalars, at)", as_write))
    run = Run()
    with js.profiling.MetricLogger(run) as log:
        log(3, {"loss": 0.5})
    assert run.told == [(3, {"loss": 0.5})]
