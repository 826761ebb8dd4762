"""What users choose: enums and frozen dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Sequence


class ReduceOp(enum.Enum):
    """How the replicas' versions of a value become one.

    Everything that takes a `ReduceOp` also takes its name as a string, in any case.

    >>> ReduceOp("sum") is ReduceOp.SUM
    True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp | None:
        if isinstance(value, str):
            return cls.__members__.get(value.upper())
        if value is None or not isinstance(value, (str, ReduceOp)):
            raise TypeError(
                f"A reduce operation was expected, got {value!r}. "
                "Use a ReduceOp or one of 'sum', 'mean', 'min', 'max'."
            )
        return None


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How one call of `Strategy.run` is compiled.

    Attributes:
      donate_argnums: positions in `args` whose memory the step may reuse for its
        results. Arrays passed there cannot be used afterwards; a later `run` that is
        given one says which argument it was.

    >>> RunOptions(donate_argnums=0).donate_argnums
    (0,)
    """

    donate_argnums: int | Sequence[int] = ()

    def __post_init__(self) -> None:
        given = self.donate_argnums
        numbers = (given,) if isinstance(given, int) else given
        try:
            positions = tuple(sorted({operator.index(n) for n in numbers}))
        except TypeError:
            raise TypeError(
                f"`donate_argnums` was {given!r}; an argument position or a sequence "
                "of them was wanted, for example `donate_argnums=(0,)`."
            ) from None
        if positions and positions[0] < 0:
            raise ValueError(
                f"`donate_argnums` was {given!r}; positions count from 0 at the first "
                "argument of the function and cannot be negative."
            )
        object.__setattr__(self, "donate_argnums", positions)

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of `donate_argnums`, always as a tuple."""
        given = self.donate_argnums
        return (given,) if isinstance(given, int) else tuple(given)


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for.

    Given to the function of `Strategy.experimental_distribute_values_from_function`.

    >>> print(ValueContext(1, 4))
    jaxstrategy.experimental.ValueContext(replica id 1, total replicas in sync: 4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            "jaxstrategy.experimental.ValueContext"
            f"(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )
