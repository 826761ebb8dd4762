"""`Explanation`: what one call of a step would do, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, final

from jaxstrategy.replicas._topology import Topology
from jaxstrategy.text._units import with_noun
from jaxstrategy.tracing.explanation import (
    _device_report,
    _explanation_report,
    _sharding_report,
)
from jaxstrategy.tracing.explanation._facts import (
    CompiledCollective,
    ExplainedCollective,
    ExplainedValue,
    Memory,
)
from jaxstrategy.tracing.explanation._report_sections import Section
from jaxstrategy.tracing.explanation._sharding_facts import ExplainedSharding


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """A description of a step, without running it. Prints as a report.

    Made by `Strategy.explain`.

    Attributes:
      name: the step's.
      num_replicas: how many replicas it was explained for.
      collectives: over the replicas, in program order, one entry for each place in the
        program.
      mirrored: the results that are equal on all replicas.
      per_replica: the results that may differ, with the line where they began to.
      static_arguments: what the step was specialised for, by argument; another value
        compiles another program.
      variables: names of the variables that it reads or assigns.
      donated: the arguments whose memory the step may reuse.
      donatable: further arguments whose memory it could reuse.
      donate_argnums: positions of arguments that could be donated whole, those that
        are already included.
      problems: what `run` would refuse or warn about.
      topology: what the report predicts communication times for.
      memory: of the compiled program, None if it was not compiled or XLA does not say.
      flops: floating-point operations of one device in the compiled program, as XLA
        counts them (a loop's body once); None likewise.
      has_loops: whether that program has loops, so that `flops` are the least there
        may be.
      sharding: how state lies and why, and what is gathered and scattered for it; None
        if the strategy has no `sharding=`, no variable is divided, and each replica is
        one device.
      replicas_per_device: how many replicas share a device.
      logical_axes: the names and sizes of the axes of devices inside a replica.
      compiled_collectives: what the devices exchange in the compiled program, over the
        replicas and inside them; None if it was not compiled.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(w, x):
    ...     mean = js.get_replica_context().all_reduce("mean", x)
    ...     return w - mean, x
    >>> shapes = jax.ShapeDtypeStruct((3,), "f4"), jax.ShapeDtypeStruct((2, 3), "f4")
    >>> found = strategy.explain(step, (shapes[0], js.PerReplica(shapes[1])))
    >>> [value.path for value in found.mirrored], found.communicated_bytes
    (['step(...)[0]'], 12)
    """

    name: str
    num_replicas: int
    collectives: tuple[ExplainedCollective, ...]
    mirrored: tuple[ExplainedValue, ...]
    per_replica: tuple[ExplainedValue, ...]
    static_arguments: dict[str, Any]
    variables: tuple[str, ...]
    donated: tuple[ExplainedValue, ...]
    donatable: tuple[ExplainedValue, ...]
    donate_argnums: tuple[int, ...]
    problems: tuple[str, ...]
    topology: Topology
    memory: Memory | None = None
    flops: float | None = None
    sharding: ExplainedSharding | None = None
    replicas_per_device: int = 1
    logical_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    compiled_collectives: tuple[CompiledCollective, ...] | None = None
    has_loops: bool = False

    @property
    def communicated_bytes(self) -> int:
        """The bytes that one replica gives to collectives over replicas in a step.

        The body of a loop of unknown length counts once, and each branch counts.
        """
        return _explanation_report.total_bytes(self.collectives)

    @property
    def inner_collectives(self) -> tuple[CompiledCollective, ...] | None:
        """Collectives of the compiled program between devices of one replica.

        XLA puts them in where arrays lie over the logical axes. None if the step was
        not compiled.
        """
        if self.compiled_collectives is None:
            return None
        return tuple(found for found in self.compiled_collectives if found.is_inner)

    @property
    def inner_bytes(self) -> int | None:
        """The bytes that one device gives to those in a step, as above."""
        found = self.inner_collectives
        return None if found is None else _explanation_report.total_bytes(found)

    def communication_time(
        self, topology: Topology, algorithm: str = "fastest"
    ) -> float:
        """The predicted seconds that a step's collectives take on `topology`.

        Each collective counts by itself, one after the other, as often as
        `least_times` says; XLA may merge neighbours, which saves latency, and overlap
        them with computation. The formulas are those of `Topology`. Where replicas
        share devices, the devices are at the ends of the links, and each has as many of
        the topology's replicas. Where a replica has several devices, arrays count as if
        each sent all of them: what lies over the logical axes takes less.

        Args:
          topology: links and number of replicas.
          algorithm: `"ring"`, `"tree"`, or `"fastest"`: for each collective the better.

        Raises:
          ValueError: there is no such algorithm.
        """
        return sum(
            found.seconds(self._devices(topology, algorithm), algorithm)
            for found in self.collectives
        )

    def communication_bounds(
        self, topology: Topology, algorithm: str = "fastest"
    ) -> tuple[float, float]:
        """The seconds between which that time is, by what is known of the links.

        Links that were measured are known for some sizes only, and took longer at one
        time than at another: see `Topology.bounds`. On others both are the same.

        Args:
          topology: links and number of replicas.
          algorithm: as above.

        Raises:
          ValueError: there is no such algorithm.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> def step(x):
        ...     return js.get_replica_context().all_reduce("sum", x)
        >>> x = strategy.per_replica(np.ones((2, 100), np.float32))
        >>> found = strategy.explain(step, (x,), compiled=False)
        >>> known = ((100, 1.0), (1000, 3.0))
        >>> found.communication_bounds(js.Topology(1e3, 1.0, 2, messages=known))
        (2.0, 6.0)
        """
        devices = self._devices(topology, algorithm)
        each = [found.bounds(devices, algorithm) for found in self.collectives]
        return sum(least for least, _ in each), sum(most for _, most in each)

    def _devices(self, topology: Topology, algorithm: str) -> Topology:
        """The links between devices."""
        if algorithm not in ("ring", "tree", "fastest"):
            raise ValueError(
                f"`algorithm` was {algorithm!r}; 'ring', 'tree' or 'fastest' was "
                "wanted."
            )
        return topology.with_replicas_per_device(self.replicas_per_device)

    def __str__(self) -> str:
        return _explanation_report.text(self._title(), self._sections())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _explanation_report.html(self._title(), self._sections())

    def _title(self) -> str:
        where = _device_report.where(self.logical_axes, self.replicas_per_device)
        return f"`{self.name}` on {with_noun(self.num_replicas, 'replica')}{where}"

    def _sections(self) -> Iterator[Section]:
        yield from _explanation_report.problems(self.problems)
        yield from _explanation_report.communication(
            self.collectives, self.topology, self.communication_bounds
        )
        if self.logical_axes or self.replicas_per_device > 1:
            yield from _device_report.exchanges(
                self.compiled_collectives, self.logical_axes
            )
        if self.sharding is not None:
            yield from _sharding_report.sections(self.sharding, self.memory)
        yield from _explanation_report.results(self.mirrored, self.per_replica)
        yield from _explanation_report.static_arguments(self.static_arguments)
        yield from _explanation_report.variables(self.variables)
        yield from _explanation_report.donation(
            self.donated, self.donatable, self.donate_argnums
        )
        yield from _explanation_report.compiled(self.flops, self.memory)
