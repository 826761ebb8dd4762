"""What a caller passes in place of what each worker has of its own."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import final

import jax

from jaxstrategy.parameter_servers._shipped_program import ElementType
from jaxstrategy.parameter_servers._worker_resource import WorkerResource
from jaxstrategy.values import _trees
from jaxstrategy.values._types import PyTree, TreeStructure


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
        """The value for one.

        Raises:
          IndexError: there is none for this worker.
        """


def is_whole(node: object) -> bool:
    """Whether a node of arguments is looked at as a whole."""
    return is_workers(node) or _trees.is_whole(node)


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
