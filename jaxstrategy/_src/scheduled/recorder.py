"""What a function uses that only its worker has, while it is traced."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import NoReturn, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.masks import BatchArray, StepMasks
from jaxstrategy._src.parameter_servers.protocol import ElementType, Input
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.kinds.server_kind import PendingChange, named

PREFIX = "jaxstrategy_worker_input_"
"""An equation of this name and a number stands for what the worker has."""


@final
class Recorder:
    """The inputs that a trace asks for besides the arguments.

    Args:
      replicas: of the function.

    Attributes:
      token: a variable that all stand-ins are made of, so that they are values that are
        unknown while the function is traced.
      inputs: those asked for, by the number in the name of the equation.
      split: which of them have one version for each replica.
      changes: the methods by which variables were changed, by their `added`.
      turns: how many elements of each iterator are taken.
      masks: of the batches among them that are filled up.
      had_masks: whether there were some.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        scalar = jax.ShapeDtypeStruct((), np.int32)
        self.token = PendingChange("what the worker has", scalar, replicas)
        self.inputs: list[Input] = []
        self.split: list[bool] = []
        self.changes: dict[Handle, set[str]] = {}
        self.turns: dict[int, int] = {}
        self._batches: list[BatchArray] = []
        self._elements: dict[tuple[int, int], int] = {}
        self.masks = StepMasks(self._batches)
        self.had_masks = False
        self._index: jax.Array | None = None

    def begin(self) -> None:
        """Forget what an earlier trace has asked for."""
        for kept in (self.inputs, self.split, self.changes, self.turns):
            kept.clear()

    def end(self) -> None:
        """Drop what only the trace may use, as it ends."""
        self.had_masks = self.masks.any
        self._batches.clear()
        self._index = None

    def ask_for_index(self) -> None:
        """Before inner functions can, whose values nobody else may use."""
        self._index = self.input(Input("index"), (), np.int32)

    @property
    def index(self) -> jax.Array | None:
        """The worker's index, an int32 scalar; None of a step that no worker runs."""
        return self._index

    def note(self, variable: Handle, method: str) -> None:
        """Takes note of a change of a variable."""
        self.changes.setdefault(variable, set()).add(method)

    def turn(self, iterator: int) -> int:
        """How many elements of an iterator were taken before; now it is one more."""
        turn = self.turns.get(iterator, 0)
        self.turns[iterator] = turn + 1
        return turn

    def input(
        self,
        given: Input,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        is_split: bool = False,
    ) -> jax.Array:
        """A stand-in for something that the worker has."""
        name = f"{PREFIX}{len(self.inputs)}"
        self.inputs.append(given)
        self.split.append(is_split)
        token = self._token(is_split)

        def stand_in(token: jax.Array) -> jax.Array:
            return jnp.zeros(shape, dtype) + token.astype(dtype)

        return named(name, stand_in)(token)

    def note_mask(
        self, array: jax.Array, mask: jax.Array, element: tuple[int, int]
    ) -> None:
        """Takes note of which rows are real of an array."""
        place = self._elements.setdefault(element, len(self._elements))
        self._batches.append(BatchArray(array, mask, place))

    def across(self, array: jax.Array) -> PyTree:
        """One replica's version as code sees all of them in cross-replica context."""
        if self._replicas.count == 1:
            return array
        return per_replica.from_local(array, self._replicas)

    def _token(self, is_split: bool) -> jax.Array:
        step = access.tracing()
        found = None if step is None else step.reference(self.token)
        assert found is not None, "the function is being traced"
        # What differs between replicas comes from their number, as far as proofs go.
        return found[...] + self._replicas.index() if is_split else found[...]


def current() -> Recorder | None:
    """The recorder of the function that is being traced; None outside of one."""
    return cast("Recorder | None", context.current().function)


@final
@dataclasses.dataclass(frozen=True)
class Element:
    """What an element of an iterator is like.

    Attributes:
      type: as programs know it.
      structure: of its pytree, with `PerReplica`s as leaves.
    """

    type: ElementType
    structure: TreeStructure


class WorkerArgument:
    """An argument of a scheduled function of which each worker has its own."""


class IteratorArgument(WorkerArgument, abc.ABC):
    """An iterator on each worker."""

    @property
    @abc.abstractmethod
    def element(self) -> Element:
        """What each element is like."""

    @property
    @abc.abstractmethod
    def resource(self) -> WorkerResource:
        """The iterators."""

    @property
    @abc.abstractmethod
    def tells_position(self) -> bool:
        """Whether workers say where it is after each call."""

    @abc.abstractmethod
    def keep_position(self, worker: int, position: object) -> None:
        """A worker's iterator is there now, and what it gave before is used."""


class ValueArgument(WorkerArgument, abc.ABC):
    """A value for each worker."""

    @abc.abstractmethod
    def of_worker(self, worker: int) -> PyTree:
        """The value for one."""


def is_whole(node: object) -> bool:
    """Whether a node of arguments is looked at as a whole."""
    return is_workers(node) or trees.is_whole(node)


def is_workers(node: object) -> bool:
    """Whether an argument is another thing on each worker."""
    return _is_workers_kind(type(node))


@functools.lru_cache(1024)
def _is_workers_kind(kind: type) -> bool:
    return issubclass(kind, WorkerArgument)


def values_of(tree: PyTree, worker: int) -> PyTree:
    """Arguments with the value for one worker in the place of each `ValueArgument`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_whole)
    # No generator: it would make another error of `OutOfRangeError`.
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, ValueArgument):
            leaves[index] = leaf.of_worker(worker)
    return jax.tree.unflatten(structure, leaves)


@final
class OptionalElement:
    """An element of a worker's iterator, or none.

    Args:
      value: the element; zeros if there is none.
      present: whether there is one.
    """

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
        """What the element is like of which so many are taken before."""
        return self.elements[min(turn, len(self.elements) - 1)]

    def retyped(self, found: Sequence[ElementType]) -> IteratorSlot:
        """This one with elements of other types."""
        structure = self.elements[0].structure
        for each in found:
            if each.structure != str(structure):
                raise ValueError(
                    "An element of a dataset has another structure than the first: "
                    f"{each.structure} instead of {structure}. Shapes may differ, but "
                    "all elements need one structure."
                )
        # Those that were not looked at yet are likely as the first was.
        types = [*(Element(each, structure) for each in found), self.elements[-1]]
        return dataclasses.replace(self, elements=tuple(types))

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "A scheduled function goes through an iterator of its worker with `for`: "
            "how many elements there are is not known while it is traced. Take as many "
            "as one call is to use, `for _ in range(steps): batch = next(iterator)`, "
            "and schedule it again for the others."
        )

    def __next__(self) -> PyTree:
        recorder = self._recorder()
        return self._taken(recorder, recorder.turn(self.number))

    def get_next(self) -> PyTree:
        """The next element; at the end the call ends with `OutOfRangeError`."""
        return next(self)

    def get_next_as_optional(self) -> OptionalElement:
        """The next element if there is one, and whether there is."""
        recorder = self._recorder()
        turn = recorder.turn(self.number)
        present = recorder.input(Input("present", self.number, turn), (), np.bool_)
        return OptionalElement(self._taken(recorder, turn), present)

    def _recorder(self) -> Recorder:
        recorder = current()
        if recorder is None:
            raise ContextError(
                "An iterator of workers was used outside of the function that it was "
                "passed to. Its elements are on the workers: use them in the function."
            )
        return recorder

    def _taken(self, recorder: Recorder, turn: int) -> PyTree:
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
