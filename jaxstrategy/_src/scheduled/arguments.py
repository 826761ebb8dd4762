"""What scheduled functions are given: values and iterators of workers, and arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Self, final

import jax
import numpy as np

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.parameter_servers.protocol import (
    ElementChanged,
    ElementType,
    Input,
)
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.replicas.mesh import as_numbers
from jaxstrategy._src.scheduled import trace as _trace
from jaxstrategy._src.scheduled.values import PerWorkerValue, WorkerArgument
from jaxstrategy._src.text import array_type
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.signature import Signature
from jaxstrategy._src.values import arrays as _arrays, per_replica, trees
from jaxstrategy._src.values.arrays import (
    Function,
    Leaf,
    PyTree,
    TreeStructure,
)
from jaxstrategy._src.values.memory import aligned_empty
from jaxstrategy._src.values.per_replica import PerReplica


class Element(NamedTuple):
    """What an element of an iterator is like."""

    type: ElementType  # as programs know it
    structure: TreeStructure  # of its pytree, with `PerReplica`s as leaves


class IteratorArgument(WorkerArgument):
    """An iterator on each worker."""

    def __init__(
        self,
        element: Callable[[], Element],  # what each element is like
        resource: WorkerResource,
        # Where that of each worker is, if workers tell it after each call.
        positions: list[Any] | None = None,
    ) -> None:
        self.element = element
        self.resource = resource
        self.positions = positions


def is_whole(node: object) -> bool:
    """Whether a node of arguments is looked at as a whole."""
    return _is_of_workers(type(node)) or trees.is_whole(node)


@functools.lru_cache(1024)
def _is_of_workers(kind: type) -> bool:
    return issubclass(kind, WorkerArgument)


@final
class OptionalElement:
    """An element of a worker's iterator, or none."""

    def __init__(self, value: PyTree, present: jax.Array) -> None:
        self._value, self._present = value, present

    def has_value(self) -> jax.Array:
        """Whether there is one, a boolean scalar that only the worker knows."""
        return self._present

    def get_value(self) -> PyTree:
        """The element; zeros of its shapes where there is none."""
        return self._value


@final
@dataclasses.dataclass(frozen=True)
class IteratorSlot:
    """The iterator of whichever worker runs the function, while it is traced."""

    number: int
    elements: tuple[Element, ...]

    def type(self, turn: int) -> Element:
        """The type of the element after so many others."""
        return self.elements[min(turn, len(self.elements) - 1)]

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "A scheduled function goes through an iterator of its worker with `for`: "
            "how many elements there are is not known while it is traced. Take as many "
            "as one call is to use, `for _ in range(steps): batch = next(iterator)`, "
            "and schedule it again for the others."
        )

    def __next__(self) -> PyTree:
        recorder = _recorder()
        return self._taken(recorder, recorder.turn(self.number))

    def get_next(self) -> PyTree:
        """The next element; at the end the call ends with `OutOfRangeError`."""
        return next(self)

    def get_next_as_optional(self) -> OptionalElement:
        """The next element if there is one, and whether there is."""
        recorder = _recorder()
        turn = recorder.turn(self.number)
        present = recorder.input(Input("present", self.number, turn), (), np.bool_)
        return OptionalElement(self._taken(recorder, turn), present)

    def _taken(self, recorder: _trace.Recorder, turn: int) -> PyTree:
        element = self.type(turn)
        nodes: list[PyTree] = []
        last: jax.Array | None = None
        for leaf, ((shape, dtype), is_split, is_mask) in enumerate(
            zip(*element.type[1:], strict=True)
        ):
            given = Input("element", self.number, turn, leaf)
            own = shape[1:] if is_split else shape
            array = recorder.input(given, own, dtype, is_split)
            if is_mask:
                assert last is not None, "a mask follows its leaf"
                recorder.note_mask(last, array, (self.number, turn))
                continue
            last = array
            nodes.append(recorder.across(array) if is_split else array)
        return jax.tree.unflatten(element.structure, nodes)


def _recorder() -> _trace.Recorder:
    recorder = _trace.current()
    if recorder is None:
        raise ContextError(
            "An iterator of workers was used outside of the function that it was "
            "passed to. Its elements are on the workers: use them in the function."
        )
    return recorder


_SMALL = 1 << 14
"""Bytes that a program copies in no time; it shares larger arrays that are aligned."""
ArgumentTypes = tuple[Signature, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""What the program of a function depends on of its arguments."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledArguments:
    """What a function is called with, wherever it runs."""

    owner: Function  # the user's, which has the programs
    fn: Function  # what is traced: it, or what calls it with the next element
    args: tuple[tuple[PyTree, ...], dict[str, PyTree]]  # with slots for iterators
    iterators: tuple[IteratorArgument, ...] = ()
    slots: tuple[IteratorSlot, ...] = ()  # what stands for them
    differ: bool = False  # whether workers are given values of their own

    @classmethod
    def of(
        cls,
        owner: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        of_element: bool,
    ) -> Self:
        """Those that a caller gave."""
        fn = OfNextElement(owner) if of_element else owner
        given = tuple(args), kwargs
        leaves, structure = jax.tree.flatten(given, is_leaf=is_whole)
        if not any(isinstance(x, WorkerArgument | PerReplica) for x in leaves):
            return cls(owner, fn, given)  # the usual case, kept short
        iterators = {id(x): x for x in leaves if isinstance(x, IteratorArgument)}
        slots = {
            key: IteratorSlot(number, (each.element(),))
            for number, (key, each) in enumerate(iterators.items())
        }
        own = [slots.get(id(leaf), _as_it_is_now(leaf)) for leaf in leaves]
        return cls(
            owner,
            fn,
            jax.tree.unflatten(structure, own),
            tuple(iterators.values()),
            tuple(slots.values()),
            differ=any(isinstance(leaf, PerWorkerValue) for leaf in own),
        )

    def retyped(self, changed: ElementChanged) -> Self:
        """The same with elements of other types."""
        slots = list(self.slots)
        slot = slots[changed.iterator]
        structure = slot.elements[0].structure
        for each in changed.found:
            if each.structure != str(structure):
                raise ValueError(
                    "An element of a dataset has another structure than the first: "
                    f"{each.structure} instead of {structure}. Shapes may differ, but "
                    "all elements need one structure."
                )
        # Those that were not looked at yet are likely as the first was.
        found = [Element(each, structure) for each in changed.found]
        elements = (*found, slot.elements[-1])
        slots[slot.number] = dataclasses.replace(slot, elements=elements)

        def retyped(node: Any) -> Any:
            return slots[node.number] if isinstance(node, IteratorSlot) else node

        args = jax.tree.map(retyped, self.args, is_leaf=is_whole)
        return dataclasses.replace(self, args=args, slots=tuple(slots))

    def on_worker(self, worker: int) -> tuple[list[Any], ArgumentTypes]:
        """The arrays of one worker, and their types."""
        args, kwargs = self.args
        if self.differ:
            leaves, structure = jax.tree.flatten(self.args, is_leaf=is_whole)
            # No generator: it would make another error of `OutOfRangeError`.
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, PerWorkerValue):
                    leaves[index] = leaf.of_worker(worker)
            args, kwargs = jax.tree.unflatten(structure, leaves)
        leaves, signature = _signature.flatten(self.fn, (args, kwargs))
        arrays = [_arrays.as_array(leaf, "argument") for leaf in leaves]
        return arrays, (signature, tuple((x.shape, x.dtype) for x in arrays))

    def sent(
        self, arrays: Sequence[Any], types: ArgumentTypes
    ) -> Callable[[int], tuple[np.ndarray, ...]]:
        """What each worker is sent, of the arrays of the first one."""
        if not self.differ:
            same = tuple(np.asarray(as_numbers(_snapshot(array))) for array in arrays)
            return lambda worker: same

        def of_worker(worker: int) -> tuple[np.ndarray, ...]:
            arrays, found = self.on_worker(worker)
            if found != types:
                raise TypeError(
                    f"Worker {worker} was to be given {_listed(found)} by a "
                    "PerWorkerValue; the function was traced for the first worker's "
                    f"value, {_listed(types)}. The values for all workers need one "
                    "structure, and the same shapes and dtypes."
                )
            return tuple(np.asarray(as_numbers(array)) for array in arrays)

        return of_worker


@final
class OfNextElement:
    """Calls a function with the next element of an iterator."""

    def __init__(self, fn: Function) -> None:
        self.__wrapped__ = fn
        self.__name__ = function_name(fn)

    def __call__(self, iterator: PyTree) -> PyTree:
        return self.__wrapped__(next(iterator))


def function_name(fn: Any) -> str:
    """The name of a function, or of what was made of one."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def _as_it_is_now(leaf: Leaf) -> Leaf:
    if isinstance(leaf, np.ndarray):
        return _snapshot(leaf)
    # A batch that is full goes without a mask: others are another program's.
    if isinstance(leaf, PerReplica) and leaf.mask is not None:
        if np.all(np.asarray(leaf.mask)):
            return PerReplica(per_replica.contents(leaf))
    return leaf


def _snapshot(array: Any) -> Any:
    """An array that the caller may change before the function runs."""
    if isinstance(array, jax.Array):
        return array
    if array.nbytes < _SMALL or array.dtype.hasobject:
        return array.copy()
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def _listed(types: ArgumentTypes) -> str:
    return ", ".join(array_type(dtype, shape) for shape, dtype in types[1])
