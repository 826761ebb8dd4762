"""All sorts of values that a checkpoint holds; a new one is a file and a line here."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from jaxstrategy.checkpoint.sorts._device_array_sort import DeviceArraySort
from jaxstrategy.checkpoint.sorts._entries import Entry
from jaxstrategy.checkpoint.sorts._host_array_sort import HostArraySort
from jaxstrategy.checkpoint.sorts._input_position_sort import InputPositionSort
from jaxstrategy.checkpoint.sorts._number_sort import NumberSort
from jaxstrategy.checkpoint.sorts._per_replica_sort import PerReplicaSort
from jaxstrategy.checkpoint.sorts._sharded_variable_sort import ShardedVariableSort
from jaxstrategy.checkpoint.sorts._sort import Sort
from jaxstrategy.checkpoint.sorts._text_sort import TextSort
from jaxstrategy.checkpoint.sorts._variable_sort import VariableSort

# The first that takes a value has it: NumPy's float64 is a float of Python, too.
SORTS: tuple[type[Sort[Any]], ...] = (
    VariableSort,
    ShardedVariableSort,
    PerReplicaSort,
    DeviceArraySort,
    HostArraySort,
    NumberSort,
    TextSort,
    InputPositionSort,
)
_BY_KIND = {sort.kind: sort for sort in SORTS}


def sort_of(name: str, value: object, home: NamedSharding | None) -> Sort[Any]:
    """The sort of a value, with its place if it lies nowhere yet.

    Raises:
      TypeError: a checkpoint cannot hold it.
    """
    for sort in SORTS:
        if sort.takes(value):
            return sort(name, value, home)
    raise TypeError(
        f"`{name}` is a {type(value).__name__}, which a checkpoint cannot hold. It "
        "holds arrays, numbers, strings, variables, PerReplicas, objects of Flax NNX "
        "and iterators of distributed datasets. Keep functions and other objects out "
        "of the state, or put what JSON can say into `extra`."
    )


def is_entry(value: object) -> bool:
    """Whether a record may have this of a value: `saved` of some value can say it."""
    match value:
        case {"kind": str(kind), **fields} if kind in _BY_KIND:
            return _BY_KIND[kind].is_entry(fields)
    return False


def described(entry: Entry) -> str:
    """A description of what was saved, for messages."""
    return _BY_KIND[entry["kind"]].told_of(entry)
