"""Visits the equations of jaxprs; the table of JAX's collectives."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from jax.extend import core

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys of a leaf in a pytree."""

ArrayType: TypeAlias = Any
"""An abstract value; `Any`, as not all of JAX's have a shape and a dtype."""


class Atom(Protocol):
    """An operand of an equation, a `Var` or a `Literal`."""

    @property
    def aval(self) -> ArrayType: ...


Var: TypeAlias = Atom
"""An input of a jaxpr, or a result of an equation."""


class Equation(Protocol):
    """One operation of a jaxpr."""

    # `Any`: JAX does not export these classes.
    primitive: core.Primitive
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any
    replace: Any

    @property
    def invars(self) -> Sequence[Atom]: ...

    @property
    def outvars(self) -> Sequence[Var]: ...


Jaxpr: TypeAlias = core.Jaxpr
"""A traced function as a list of equations, without constants."""

ClosedJaxpr: TypeAlias = Any
"""A jaxpr with its constants; before JAX 0.12 a class of its own."""


def plain(jaxpr: ClosedJaxpr) -> Jaxpr:
    """`jaxpr` without its constants; before JAX 0.12 a class of its own."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_eqns(params: object) -> Iterator[Equation]:
    """All equations in the jaxprs among an equation's parameters."""
    seen: set[int] = set()
    for jaxpr in inner_jaxprs(params):
        yield from all_eqns(jaxpr, seen)


def all_eqns(jaxpr: Jaxpr, seen: set[int] | None = None) -> Iterator[Equation]:
    """All equations of `jaxpr` and inner jaxprs, each once."""
    seen = set() if seen is None else seen
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from all_eqns(inner, seen)


def inner_jaxprs(value: object) -> Iterator[Jaxpr]:
    """The jaxprs among parameters, without their constants."""
    return map(plain, closed_jaxprs(value))


def closed_jaxprs(value: object) -> Iterator[ClosedJaxpr]:
    """The jaxprs among parameters, with their constants."""
    if value.__class__ in _PLAIN:
        return
    if hasattr(value, "eqns"):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            if item.__class__ not in _PLAIN:
                yield from closed_jaxprs(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            if item.__class__ not in _PLAIN:
                yield from closed_jaxprs(item)


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """The atoms without literals."""
    return (x for x in atoms if not isinstance(x, core.Literal | core.DropVar))


def origins_of(eqns: Iterable[Equation]) -> dict[Var, Equation]:
    """The equation that computes each variable."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def uses_of(eqns: Iterable[Equation]) -> dict[Var, list[Equation]]:
    """The equations that read each variable."""
    uses: dict[Var, list[Equation]] = collections.defaultdict(list)
    for eqn in eqns:
        for var in variables(eqn.invars):
            uses[var].append(eqn)
    return uses


def read_by(eqns: Iterable[Equation]) -> set[Var]:
    """The variables that equations read."""
    return set(variables(atom for eqn in eqns for atom in eqn.invars))


def live_equations(
    eqns: Sequence[Equation],
    outputs: Iterable[Atom],
    operands: Callable[[Equation], Iterable[Atom]] = lambda eqn: eqn.invars,
) -> list[Equation]:
    """The equations from which `outputs` are computed (dead code elimination).

    Args:
      operands: what an equation needs.
    """
    live, eqns_kept = set(variables(outputs)), list[Equation]()
    for eqn in reversed(eqns):
        if not live.isdisjoint(eqn.outvars):
            eqns_kept.append(eqn)
            live.update(variables(operands(eqn)))
    return eqns_kept[::-1]


def with_jaxprs(value: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A parameter of an equation, with each jaxpr in it changed."""
    if isinstance(value, (tuple, list)) and any(hasattr(x, "eqns") for x in value):
        new = [with_jaxprs(each, change) for each in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        # `custom_linear_solve` keeps its jaxprs in named tuples.
        make = getattr(value, "_make", type(value))
        return make(new)
    if not hasattr(value, "eqns"):
        return value
    inner = plain(value)
    new = change(inner)
    if new is inner:
        return value
    if inner is value:
        return new
    closed: Any = value
    return closed.replace(jaxpr=new)


# The classes of most parameters.
_PLAIN = frozenset((int, bool, float, str, type(None), np.dtype))


def jaxpr_of(
    invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]
) -> Jaxpr:
    """A jaxpr of these equations, without constants."""
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
    given: Any = (list(invars), list(outvars), list(eqns))
    # JAX's own would have other numbers of inputs and results.
    debug_info = core.DebugInfo("jit", "part of a step", None, None)
    return core.Jaxpr((), *given, effects=effects, debug_info=debug_info)


def closed(jaxpr: Jaxpr) -> ClosedJaxpr:
    """A closed jaxpr without constants."""
    # One class since JAX 0.12, where `ClosedJaxpr` is deprecated.
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return core.ClosedJaxpr(jaxpr, ())  # pyright: ignore[reportPrivateImportUsage]


class Effect(enum.Enum):
    """What a collective does."""

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
    kind: str  # for a `Topology`
    lowered: str  # the StableHLO operation
    functions: tuple[str, ...] = ()  # of `jax.lax`, for users


_ROWS = (
    ("psum", Effect.SUM, "all_reduce", "all_reduce", ("psum", "pmean")),
    ("psum_invariant", Effect.SUM, "all_reduce", "all_reduce"),
    ("pmax", Effect.EXTREME, "all_reduce", "all_reduce", ("pmax",)),
    ("pmin", Effect.EXTREME, "all_reduce", "all_reduce", ("pmin",)),
    ("all_gather", Effect.GATHER, "all_gather", "all_gather", ("all_gather",)),
    ("all_gather_invariant", Effect.GATHER, "all_gather", "all_gather"),
    # No slower than an all-reduce; a `Topology` has no formula for it.
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
    """The effect of a collective; None for other equations."""
    row = COLLECTIVES.get(eqn.primitive.name)
    return None if row is None else row.effect


def primitives_with(*effects: Effect) -> list[str]:
    """The names of primitives with one of these effects."""
    return [row.name for row in COLLECTIVES.values() if row.effect in effects]


def axis_names(eqn: Equation) -> tuple[object, ...]:
    """The mesh axes along which an equation communicates; none for most."""
    # `psum`, `pmax` and `pmin` have `axes`, the others `axis_name`: a tuple of names
    # or one name (JAX 0.10 and 0.12).
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def is_along(eqn: Equation, axes: Iterable[str]) -> bool:
    """Whether an equation communicates along one of these mesh axes."""
    return not set(axes).isdisjoint(axis_names(eqn))
