"""Objects that stand for a value and are passed on as themselves: `Handle`."""

from __future__ import annotations

import abc

import jax

from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.values.per_replica import PerReplica


class Handle(abc.ABC):
    """Something that stands for a value and is passed on as itself: a variable.

    Attributes:
      number: its place in the order in which they were made.
    """

    number: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in messages."""

    @abc.abstractmethod
    def value(self) -> jax.Array:
        """The value that the copies have together, or the replica's own in a step."""

    @abc.abstractmethod
    def distributed(self) -> jax.Array | PerReplica:
        """All copies of it: a mirrored array or a `PerReplica`."""

    @property
    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """The replicas that have a copy each."""

    @property
    @abc.abstractmethod
    def is_distributed(self) -> bool:
        """Whether it belongs to a strategy, and so has a copy for each replica."""

    @property
    @abc.abstractmethod
    def copies_must_agree(self) -> bool:
        """Whether it has no copies that may differ."""

    @property
    @abc.abstractmethod
    def division(self) -> LeafSharding:
        """The dimension along which it is divided over the replicas, or why none is."""
