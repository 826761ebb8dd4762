"""The parts of an explanation: collectives, values, memory, sharded state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, final

from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text import Line

Predict: TypeAlias = Callable[[Topology, str, float], float]
"""(links, kind of collective, bytes) -> seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractCollective:
    """A collective of a step, or of a compiled program.

    Attributes:
      operation: JAX's name for it, such as `"psum"`, or XLA's, such as `"all-reduce"`.
      kind: what it is to a `Topology`, such as `"all_reduce"`.
      nbytes: bytes of the operands of one replica, or device, each time.
      dtypes: of the operands.
      loops: how often each loop around it turns, the innermost first; None where only
        the devices will know.
      in_branch: whether it is in a branch, and may be left out.
      groups: the replicas, or the devices by their places in the mesh, that take part
        together; None: all of them.
      line: the user's line that made it, or else where the step is defined. In a
        compiled program that which computes what is exchanged, of several that XLA has
        put together the first, or else the one that reads it; None if XLA kept none.
    """

    operation: str
    kind: str
    nbytes: int
    dtypes: tuple[str, ...]
    loops: tuple[int | None, ...] = ()
    in_branch: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None
    line: Line | None = None

    @property
    def group(self) -> int | None:
        """The size of a group of replicas or devices; None for all of them."""
        return None if self.groups is None else max(map(len, self.groups))

    @property
    def times(self) -> int | None:
        """How often a step does it, at most; None where only the devices know."""
        return None if None in self.loops else self.least_times

    @property
    def least_times(self) -> int:
        """The same, with one iteration for each loop of unknown length."""
        return math.prod(1 if turns is None else turns for turns in self.loops)

    def seconds(self, topology: Topology, algorithm: str) -> float:
        """The predicted time of `least_times` of it, by a method of `Topology`.

        Where replicas share devices, the topology is that of the devices.
        """
        return self.least_times * self._once(
            topology, lambda links, *of: getattr(links, algorithm)(*of)
        )

    def bounds(self, topology: Topology, algorithm: str) -> tuple[float, float]:
        """Lower and upper bounds of that time, by `Topology.bounds`."""

        def bound(which: int) -> float:
            return self.least_times * self._once(
                topology,
                lambda links, *of: links.bounds(*of, algorithm=algorithm)[which],
            )

        return bound(0), bound(1)

    def _once(self, topology: Topology, predict: Predict) -> float:
        """The time of the slowest group."""
        links = {topology}
        if self.groups is not None:
            n = topology.replicas
            groups = [[i for i in group if i < n] for group in self.groups]
            links = {topology.among(group) for group in groups if group}
        return max(predict(each, self.kind, self.nbytes) for each in links)


@final
@dataclasses.dataclass(frozen=True)
class DeviceExchange:
    """A collective between devices that have several replicas each.

    Attributes:
      kind: what it is to a `Topology`, such as `"all_gather"`.
      nbytes: bytes of one device's operands.
    """

    kind: str
    nbytes: int


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedCollective(AbstractCollective):
    """A collective operation over the replicas.

    Attributes:
      is_transposed: whether differentiation made it out of that line.
      cause: `"step"` if the step says so; `"sharding"` if it is there because state is
        divided (a reduce-scatter, or a gather before an
        array is used); `"compiler"` if XLA needs it, where it computes once for all
        replicas what follows the last reduction.
      array: the argument, variable or result that is gathered, if one is.
      why: the reason in words, if the step does not say so.
      parts: into how many parts the operand's array is divided; of more
        replicas, each has a smaller part. 1 if an operand is a whole array.
      between_devices: where replicas share devices, what several devices exchange for
        it; None where each replica has devices of its own.
    """

    is_transposed: bool = False
    cause: Literal["step", "sharding", "compiler"] = "step"
    array: str = ""
    why: str = ""
    parts: int = 1
    between_devices: tuple[DeviceExchange, ...] | None = None

    def _once(self, topology: Topology, predict: Predict) -> float:
        if (exchanges := self.between_devices) is not None:
            return sum(predict(topology, each.kind, each.nbytes) for each in exchanges)
        # `parts` is the number of replicas of the explained step.
        scale = self.parts / topology.replicas if self.parts > 1 else 1
        return super()._once(
            topology, lambda links, kind, nbytes: predict(links, kind, nbytes * scale)
        )


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledCollective(AbstractCollective):
    """A collective of the compiled program, between devices.

    Attributes:
      axes: the axes of the mesh along which the devices of a group differ.
      inner_axes: the axes of the mesh that are inside a replica.
    """

    axes: tuple[str, ...]
    inner_axes: tuple[str, ...]

    @property
    def is_inner(self) -> bool:
        """Whether devices of one replica take part together."""
        return not set(self.axes).isdisjoint(self.inner_axes)


@final
@dataclasses.dataclass(frozen=True)
class ExplainedValue:
    """An array among the arguments or results.

    Attributes:
      path: how the user would write it, such as `"step(...)['loss']"`.
      shape: on one replica.
      dtype: of its elements.
      nbytes: of it on one replica.
      line: for a result that varies, the user's line where it began to; None if it
        does not vary, or does so as the argument that it is.
      why: the same in words, empty if it does not vary.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    line: Line | None = None
    why: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of the compiled program on one device, in bytes, as XLA reports it.

    Attributes:
      arguments: the arguments.
      results: the results, those in donated memory included.
      donated: the part of the results that lies in donated memory.
      temporary: what is needed in between.
      code: the program itself.
    """

    arguments: int
    results: int
    donated: int
    temporary: int
    code: int

    @property
    def peak(self) -> int:
        """All of it at once, an upper bound."""
        return self.arguments + self.results - self.donated + self.temporary + self.code


@final
@dataclasses.dataclass(frozen=True)
class ExplainedLeaf:
    """An array that is equal on all replicas, and the part of it that each keeps.

    Attributes:
      path: how the user would write it, such as `"state.params['kernel']"`.
      shape: of all of it.
      dtype: of its elements.
      nbytes: of all of it.
      device_bytes: of what lies on one device.
      dimension: along which it is divided over the replicas; None if it is whole.
      reason: why it is whole, in words; empty if it is divided.
      inner: how the devices of each replica divide it over the logical axes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device_bytes: int
    dimension: int | None
    reason: str
    inner: InnerSpec = WHOLE


@final
@dataclasses.dataclass(frozen=True)
class WholeSum:
    """A large all-reduce where a reduce-scatter would do.

    Attributes:
      shape: of the sum.
      dtype: of its elements.
      nbytes: of all of it.
      line: the user's line that sums, None if JAX did not keep it.
      reason: why each replica gets all of it, in words.
      reader: the user's line that is the reason, if one is.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    line: Line | None
    reason: str
    reader: Line | None = None


@final
@dataclasses.dataclass(frozen=True)
class UndecidedOperation:
    """An operation on divided arrays for which XLA alone chooses what it exchanges.

    Such are matrix products in an optimizer. What they exchange is not among the
    collectives of an explanation.

    Attributes:
      operation: JAX's name for it, such as `"dot_general"`.
      count: how many of them this line makes.
      line: the user's line that made it, None if JAX did not keep it.
    """

    operation: str
    count: int
    line: Line | None


@final
@dataclasses.dataclass(frozen=True)
class ExplainedSharding:
    """The state of a step that may be divided, and what that costs.

    Attributes:
      shard: what the strategy divides: `"state"` or `"optimizer"`; None if it divides
        nothing by itself, but for variables.
      num_replicas: over how many replicas.
      leaves: all arguments and variables that are equal on all replicas, divided ones
        and whole ones.
      results: likewise, of the results; one that XLA may place counts as if each device
        of a replica had all of it.
      collectives: those that are there because state is divided; `collectives` of the
        `Explanation` has them and all others.
      whole_sums: the large sums that are not divided.
      undecided: what may exchange more.
    """

    shard: str | None
    num_replicas: int
    leaves: tuple[ExplainedLeaf, ...]
    results: tuple[ExplainedLeaf, ...]
    collectives: tuple[ExplainedCollective, ...]
    whole_sums: tuple[WholeSum, ...]
    undecided: tuple[UndecidedOperation, ...]

    @property
    def divided(self) -> tuple[ExplainedLeaf, ...]:
        """The arguments and variables that are sharded over replicas."""
        return tuple(leaf for leaf in self.leaves if leaf.dimension is not None)

    @property
    def whole(self) -> tuple[ExplainedLeaf, ...]:
        """The arguments and variables that each replica keeps whole."""
        return tuple(leaf for leaf in self.leaves if leaf.dimension is None)

    @property
    def state_bytes(self) -> int:
        """The bytes of arguments and variables on one device, between steps."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    @property
    def replicated_bytes(self) -> int:
        """The same if every replica kept all of them."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of all whole arrays that a step gathers."""
        return self.num_replicas * self._bytes("all_gather")

    @property
    def scattered_bytes(self) -> int:
        """The bytes of all whole sums that a step scatters."""
        return self._bytes("reduce_scatter")

    def _bytes(self, kind: str) -> int:
        return total_bytes(each for each in self.collectives if each.kind == kind)


def total_bytes(collectives: Iterable[AbstractCollective]) -> int:
    """The bytes of the operands of one replica, or device, in a step."""
    return sum(found.least_times * found.nbytes for found in collectives)
