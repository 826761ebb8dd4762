"""The arguments of a scheduled function: `ScheduledArguments`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import jax
import numpy as np

from jaxstrategy.parameter_servers._aligned_memory import aligned_empty
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.replicas._random_keys import as_numbers
from jaxstrategy.scheduled._iterator_slot import IteratorSlot
from jaxstrategy.scheduled._worker_argument import (
    IteratorArgument,
    ValueArgument,
    is_whole,
    is_workers,
    values_of,
)
from jaxstrategy.text._array_types import array_type
from jaxstrategy.tracing import _roles
from jaxstrategy.tracing._roles import Signature
from jaxstrategy.values import _arrays, _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Function, Leaf, PyTree

_SMALL = 1 << 14
"""Bytes that a program copies in no time; it shares larger arrays that are aligned."""
_Key = tuple[Signature, tuple[tuple[tuple[int, ...], np.dtype], ...]]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledArguments:
    """What a function is called with, wherever it runs.

    Attributes:
      fn: the function.
      args: its arguments and those by name, with a slot in place of each iterator.
      iterators: what the caller gave in their places.
      slots: for each of them what the function sees.
      differ: whether workers have arguments of their own.
    """

    fn: Function
    args: tuple[tuple[PyTree, ...], dict[str, PyTree]]
    iterators: tuple[IteratorArgument, ...]
    slots: tuple[IteratorSlot, ...]
    differ: bool

    @classmethod
    def of(
        cls, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Self:
        """Those that a caller gave."""
        given = tuple(args), kwargs
        leaves, structure = jax.tree.flatten(given, is_leaf=is_whole)
        if not any(map(_is_special, leaves)):  # the usual case, kept short
            return cls(fn, given, (), (), differ=False)
        iterators: dict[int, IteratorArgument] = {
            id(leaf): leaf for leaf in leaves if isinstance(leaf, IteratorArgument)
        }
        slots = {
            key: IteratorSlot(number, (each.element,))
            for number, (key, each) in enumerate(iterators.items())
        }
        own = [slots.get(id(leaf), _taken(leaf)) for leaf in leaves]
        return cls(
            fn,
            jax.tree.unflatten(structure, own),
            tuple(iterators.values()),
            tuple(slots.values()),
            differ=any(isinstance(leaf, ValueArgument) for leaf in own),
        )

    def retyped(self, changed: ElementChanged) -> Self:
        """The same with elements of other types.

        Raises:
          ValueError: they have another structure.
        """
        slots = list(self.slots)
        slots[changed.iterator] = slots[changed.iterator].retyped(changed.found)

        def slot(node: Any) -> Any:
            return slots[node.number] if isinstance(node, IteratorSlot) else node

        args = jax.tree.map(slot, self.args, is_leaf=is_whole)
        return dataclasses.replace(self, args=args, slots=tuple(slots))

    def taken_apart(self, worker: int) -> tuple[list[Leaf], Signature]:
        """The leaves of the arguments on one worker, and their signature.

        Raises:
          IndexError: an argument has no value for it.
        """
        args, kwargs = values_of(self.args, worker) if self.differ else self.args
        return _roles.take_apart(self.fn, args, kwargs)

    def arrays(self, leaves: Sequence[Leaf]) -> list[Any]:
        """The leaves as arrays."""
        return [_arrays.as_array(leaf, "argument") for leaf in leaves]

    def of_workers(
        self, arrays: Sequence[Any], key: _Key
    ) -> Callable[[int], tuple[np.ndarray, ...]]:
        """The arrays for each worker.

        Args:
          arrays: those of the first one.
          key: their signature and types.

        Returns:
          A function of the worker. It raises `IndexError` if an argument has no value
          for this worker, and `TypeError` if that is of another type than the first's.
        """
        first = tuple(np.asarray(as_numbers(_snapshot(array))) for array in arrays)
        return self._of_worker(key) if self.differ else lambda worker: first

    def _of_worker(self, key: _Key) -> Callable[[int], tuple[np.ndarray, ...]]:
        signature, types = key

        def of_worker(worker: int) -> tuple[np.ndarray, ...]:
            leaves, own = self.taken_apart(worker)
            arrays = self.arrays(leaves)
            if own != signature or tuple((x.shape, x.dtype) for x in arrays) != types:
                raise TypeError(
                    f"Worker {worker} was to be given {_listed(arrays)} by a "
                    "PerWorkerValue; the function was traced for the first worker's "
                    f"value, {', '.join(array_type(d, s) for s, d in types)}. The "
                    "values for all workers need one structure, and the same shapes "
                    "and dtypes."
                )
            return tuple(np.asarray(as_numbers(array)) for array in arrays)

        return of_worker


def _is_special(leaf: Leaf) -> bool:
    return is_workers(leaf) or isinstance(leaf, PerReplica)


def _taken(leaf: Leaf) -> Leaf:
    """A leaf as it is now."""
    is_callers = isinstance(leaf, np.ndarray)
    return _snapshot(leaf) if is_callers else _without_full_mask(leaf)


def _snapshot(array: Any) -> Any:
    """An array that the caller may change before the function runs."""
    if isinstance(array, jax.Array):
        return array
    if array.nbytes < _SMALL or array.dtype.hasobject:
        return array.copy()
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def _without_full_mask(leaf: Leaf) -> Leaf:
    """A batch that is full, without a mask: others are another program's."""
    if not isinstance(leaf, PerReplica) or leaf.mask is None:
        return leaf
    is_full = np.all(np.asarray(leaf.mask))
    return PerReplica(_per_replica.contents(leaf)) if is_full else leaf


def _listed(arrays: Sequence[Any]) -> str:
    return ", ".join(array_type(array.dtype, array.shape) for array in arrays)
