"""Variables."""

from __future__ import annotations

from typing import Any, final

import jax

from jaxstrategy._options import VariableAggregation, VariableSynchronization
from jaxstrategy.checkpoint.sorts import _entries
from jaxstrategy.checkpoint.sorts._array_sort import AbstractArraySort
from jaxstrategy.checkpoint.sorts._device_array_sort import DeviceArraySort
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)
from jaxstrategy.variables._variable import Variable
from jaxstrategy.variables.kinds._per_worker_kind import per_worker_kind_of


@final
class VariableSort(AbstractArraySort[Variable]):
    """A `Variable`, of which the value is saved: that of all copies together."""

    @staticmethod
    def takes(value: object) -> bool:
        return isinstance(value, Variable)

    def saved(self) -> tuple[Entry, Array | None]:
        check_has_value(self.name, self.value)
        return _entries.array_entry(self.value.value())

    def difference(self, entry: Entry, told: str) -> str | None:
        check_has_value(self.name, self.value)
        return DeviceArraySort(self.name, self._struct, None).difference(entry, told)

    def reading(self, entry: Entry) -> Reading | None:
        return DeviceArraySort(self.name, self._struct, None).reading(entry)

    def restored(self, entry: Entry, array: Array | None) -> object:
        return DeviceArraySort(self.name, self._struct, None).restored(entry, array)

    def put(self, restored: Any) -> Variable:
        self.value.assign(restored)
        return self.value

    @property
    def _struct(self) -> jax.ShapeDtypeStruct:
        where = self.value.sharding_of_value
        return jax.ShapeDtypeStruct(self.value.shape, self.value.dtype, sharding=where)


def check_has_value(name: str, variable: Variable) -> None:
    """Raise unless there is a value to save, that of all copies together.

    Raises:
      ValueError: the copies have none.
    """
    if per_worker_kind_of(variable) is not None:
        raise ValueError(
            f"`{name}`, variable {variable.name!r}, has a copy on each worker, so it "
            "has no one value to save or restore. Leave it out of the state, or save "
            "the copies: `variable.read_all()`."
        )
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    has_copies = on_read and variable.strategy is not None
    if has_copies and variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"`{name}`, variable {variable.name!r}, has a copy per replica "
            "and aggregation NONE, so it has no one value to save or restore. Make "
            "it with `aggregation='sum'`, 'mean' or 'only_first_replica', or save "
            "the copies: `variable.distributed()`."
        )
