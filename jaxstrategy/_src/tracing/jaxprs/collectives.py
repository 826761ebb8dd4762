"""The one table of JAX's collectives, with what each of them does."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any, cast

from jaxstrategy._src.tracing.jaxprs.visit import Equation


class Effect(enum.Enum):
    """The effect of a collective on the replicas' values."""

    SUM = "every replica has the sum"
    EXTREME = "every replica has the smallest or largest"
    GATHER = "every replica has all values"
    BROADCAST = "every replica has the value of one"
    PERMUTE = "every replica has the value of another, or zeros"
    SCATTER = "every replica has another part"
    SUM_SCATTER = "every replica has another part of the sum"
    UNKNOWN = "nothing is known of it"


@dataclasses.dataclass(frozen=True)
class CollectivePrimitive:
    """One of JAX's collectives."""

    name: str
    effect: Effect
    kind: str
    lowered: str
    functions: tuple[str, ...] = ()


# Each: its name, what it does, what it is to a `Topology`, what StableHLO calls it, and
# the functions of `jax.lax` that users call for it.
_ROWS = (
    ("psum", Effect.SUM, "all_reduce", "all_reduce", ("psum", "pmean")),
    ("psum_invariant", Effect.SUM, "all_reduce", "all_reduce"),
    ("pmax", Effect.EXTREME, "all_reduce", "all_reduce", ("pmax",)),
    ("pmin", Effect.EXTREME, "all_reduce", "all_reduce", ("pmin",)),
    ("all_gather", Effect.GATHER, "all_gather", "all_gather", ("all_gather",)),
    ("all_gather_invariant", Effect.GATHER, "all_gather", "all_gather"),
    # It takes no longer than an all-reduce, and a `Topology` has no formula for it.
    ("pbroadcast", Effect.BROADCAST, "all_reduce", "collective_broadcast",
     ("pbroadcast",)),
    ("ppermute", Effect.PERMUTE, "permute", "collective_permute",
     ("ppermute", "pshuffle")),
    ("all_to_all", Effect.SCATTER, "all_to_all", "all_to_all",
     ("all_to_all", "pswapaxes")),
    ("ragged_all_to_all", Effect.SCATTER, "all_to_all", "all_to_all",
     ("ragged_all_to_all",)),
    ("reduce_scatter", Effect.SUM_SCATTER, "reduce_scatter", "reduce_scatter",
     ("psum_scatter",)),
    ("psend", Effect.SCATTER, "permute", "send"),
    ("precv", Effect.SCATTER, "permute", "recv"),
    ("pgather", Effect.UNKNOWN, "permute", "all_gather"),
)  # fmt: skip
COLLECTIVES = {row[0]: CollectivePrimitive(*row) for row in cast(Any, _ROWS)}


def effect_of(eqn: Equation) -> Effect | None:
    """The effect of the collective that `eqn` is; None if it is none of JAX's."""
    row = COLLECTIVES.get(eqn.primitive.name)
    return None if row is None else row.effect


def named(*effects: Effect) -> list[str]:
    """The primitives with one of these effects."""
    return [row.name for row in COLLECTIVES.values() if row.effect in effects]


def names(eqn: Equation) -> tuple[object, ...]:
    """The names of the mesh axes along which an equation works; none of most."""
    # `psum`, `pmax` and `pmin` have `axes`, the others `axis_name`: a tuple of names
    # or one name (JAX 0.10 and 0.12).
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def is_along(eqn: Equation, axes: Iterable[str]) -> bool:
    """Whether an equation works along one of these mesh axes."""
    return not set(axes).isdisjoint(names(eqn))
