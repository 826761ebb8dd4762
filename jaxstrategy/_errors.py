"""Exceptions and warnings that a caller can act on."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.text._lists import and_more, listed
from jaxstrategy.text._units import with_noun

_SHOWN = 200  # characters of a value in a message


class ContextError(RuntimeError):
    """A method was called on the wrong side of `run`, or for another strategy."""


class TracedValueError(TypeError):
    """Python needed the value of something that is known only on the devices.

    The original JAX error is the `__cause__`.
    """


class LeakedTracerError(RuntimeError):
    """A step left a value of its trace in something that stays after the step.

    The message names the place and the line where the value was made.
    """


class PlacementError(ValueError):
    """A value lies on devices, or is split in a way, that the strategy cannot use."""


class DonatedValueError(RuntimeError):
    """A value was used after its memory had been given to an earlier step."""


class DivergentCollectiveError(RuntimeError):
    """Only some replicas would reach a collective, and wait for ever for the others.

    Attributes:
      collective_line: `file:line: code` of the collective, None if unknown.
      predicate_line: of where the value that decides began to vary.
    """

    def __init__(
        self,
        message: str,
        collective_line: str | None = None,
        predicate_line: str | None = None,
    ) -> None:
        super().__init__(message)
        self.collective_line = collective_line
        self.predicate_line = predicate_line


class NotMirroredError(RuntimeError):
    """A result that should be equal on all replicas may differ between them.

    Attributes:
      path: the result, as in `step(...)['params']`.
      line: `file:line: code` of where it began to vary, None if unknown.
    """

    def __init__(
        self, message: str, path: str | None = None, line: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class NotMirroredVariableError(NotMirroredError, ValueError):
    """A step assigns a mirrored variable a value that may differ between replicas.

    Attributes:
      path: the variable's name.
      line: `file:line: code` of where the value began to vary, None if unknown.
    """


class NotMirroredWarning(UserWarning):
    """State goes into a step equal on all replicas and comes out different on each."""


class NonFiniteError(FloatingPointError):
    """A NaN or an Inf arose in a step that was to be checked.

    Attributes:
      replicas: the ids of those where it arose.
      line: `file:line: code` of where, None if it came in, or if it is unknown.
      source: the argument or variable that it came in by, None if it did not.
    """

    def __init__(
        self,
        message: str,
        replicas: tuple[int, ...] = (),
        line: str | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        self.replicas = replicas
        self.line = line
        self.source = source


class OutOfSyncError(RuntimeError):
    """Replicas hold different copies of what should be equal on all of them.

    Attributes:
      leaves: the arrays that differ, by their paths; for each the groups of replicas
        that agree, the largest first: `{"tree['w']": ((0, 1, 3), (2,))}`.
    """

    _NAMED = 8  # arrays, groups, and replicas of a group; the others are counted

    def __init__(self, leaves: dict[str, tuple[tuple[int, ...], ...]]) -> None:
        super().__init__(leaves)
        self.leaves = leaves

    def __str__(self) -> str:
        count = len(self.leaves)
        are = "is" if count == 1 else "are"
        arrays = with_noun(count, "array")
        lines = [f"{arrays} {are} not equal, bit by bit, on all replicas:"]
        lines += [
            f"  `{path}`: {self._told(groups)}"
            for path, groups in list(self.leaves.items())[: self._NAMED]
        ]
        if more := and_more(count, self._NAMED):
            lines += [f" {more}; the exception's `leaves` has them all"]
        return "\n".join([*lines, self._ADVICE])

    def _told(self, groups: tuple[tuple[int, ...], ...]) -> str:
        most, *others = groups
        rest = sorted(replica_id for group in others for replica_id in group)
        if len(most) <= len(rest):
            named = " | ".join(map(self._listed, groups[: self._NAMED]))
            return f"replicas {named}{and_more(len(groups), self._NAMED)}"
        if len(rest) == 1:
            return f"replica {rest[0]} differs from the other {len(most)}"
        return f"replicas {self._listed(rest)} differ from the other {len(most)}"

    def _listed(self, replica_ids: Sequence[int]) -> str:
        return listed(replica_ids, self._NAMED)

    _ADVICE = (
        "`run` gives back as one array only what it has proved equal, so look for what "
        "it cannot see: arrays put together by hand, callbacks with side effects, host "
        "data that differs between processes, GPU operations that are not "
        "deterministic, faulty hardware. A PerReplica differs if something it was "
        "computed from was not reduced. To go on, restore a checkpoint, or mirror the "
        "copies of one replica i that you trust: of an array "
        "`strategy.mirror(array.addressable_data(i))`, of a PerReplica "
        "`strategy.mirror(value.local(i))`."
    )


class SimulationError(RuntimeError):
    """Simulated devices were asked for after JAX had already started its devices."""


class ClusterError(RuntimeError):
    """The processes of a job could not meet, or one of them cannot go on.

    The message names the processes by their ids and hosts.
    """


class MissingExtraError(ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class RecompilationWarning(UserWarning):
    """One function is compiled again and again; the message says what changed."""


class DoubleReductionWarning(UserWarning):
    """The result of a reduction is summed over the replicas again."""


class PaddedRowsWarning(UserWarning):
    """A step was given rows that only fill up a batch, and does not ask which."""


class OutOfRangeError(StopIteration):
    """`get_next` was called at the end of the data; TensorFlow's name for it."""


class ObjectError(ValueError):
    """A step does to an object what a compiled step cannot do, or what would be lost.

    Such objects are modules, optimizers and metrics of Flax NNX.
    """


def shown(value: object) -> str:
    """A value for a message: on one line, not long, whatever it is.

    Python writes no integer of more than 4,300 digits, and no deep nest.
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:
        kind = type(value).__name__
        if isinstance(value, int):
            sign = "a negative" if value < 0 else "an"
            return f"{sign} {kind} of {value.bit_length()} bits"
        return f"a {kind} that cannot be printed"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
