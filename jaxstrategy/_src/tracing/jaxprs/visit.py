"""The types of jaxprs, and ways through one and those that its equations hold."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.extend import core

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys that lead to a leaf of a pytree."""

ArrayType: TypeAlias = Any
"""Shape and dtype of an array that is being traced; to JAX a type that has neither."""


class Atom(Protocol):
    """An operand of an equation, a `Var` or a `Literal`."""

    @property
    def aval(self) -> ArrayType:
        """Its type."""
        ...


Var: TypeAlias = Atom
"""An input of a jaxpr, or what an equation makes."""


class Equation(Protocol):
    """One operation of a jaxpr."""

    # `Any`: JAX exports no classes of what equations hold besides.
    primitive: core.Primitive
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    @property
    def invars(self) -> Sequence[Atom]:
        """Its operands."""
        ...

    @property
    def outvars(self) -> Sequence[Var]:
        """The values that it makes."""
        ...


Jaxpr: TypeAlias = core.Jaxpr
"""A traced function as a list of equations, without constants."""

ClosedJaxpr: TypeAlias = Any
"""A jaxpr with its constants; before JAX 0.12 a class of its own."""


def plain(jaxpr: ClosedJaxpr) -> Jaxpr:
    """`jaxpr` without its constants; before JAX 0.12 those are a class of their own."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def hidden(params: object) -> Iterator[Equation]:
    """All equations in the jaxprs among the parameters of an equation."""
    seen: set[int] = set()
    for jaxpr in inner_jaxprs(params):
        yield from all_eqns(jaxpr, seen)


def all_eqns(jaxpr: Jaxpr, seen: set[int] | None = None) -> Iterator[Equation]:
    """All equations of `jaxpr`, those inside others too, each once."""
    seen = set() if seen is None else seen
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from all_eqns(inner, seen)


def inner_jaxprs(value: object) -> Iterator[Jaxpr]:
    """The jaxprs in some parameters, without their constants."""
    return map(plain, closed_jaxprs(value))


def closed_jaxprs(value: object) -> Iterator[ClosedJaxpr]:
    """The jaxprs in some parameters, with their constants."""
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
    """The atoms that are no literals."""
    return (x for x in atoms if not isinstance(x, core.Literal | core.DropVar))


def origins_of(eqns: Iterable[Equation]) -> dict[Var, Equation]:
    """The equation that makes each variable."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def uses_of(eqns: Iterable[Equation]) -> dict[Var, list[Equation]]:
    """The equations that read each variable; of one that is not read there are none."""
    uses: dict[Var, list[Equation]] = collections.defaultdict(list)
    for eqn in eqns:
        for var in variables(eqn.invars):
            uses[var].append(eqn)
    return uses


def live_equations(eqns: Sequence[Equation], wanted: Iterable[Var]) -> list[Equation]:
    """The equations that some variables are made by."""
    live, found = set(wanted), list[Equation]()
    for eqn in reversed(eqns):
        if not live.isdisjoint(eqn.outvars):
            found.append(eqn)
            live.update(variables(eqn.invars))
    return found[::-1]


def with_jaxprs(value: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A parameter of an equation, with each jaxpr in it changed."""
    if isinstance(value, (tuple, list)) and any(hasattr(x, "eqns") for x in value):
        new = [with_jaxprs(each, change) for each in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        # `custom_linear_solve` has named tuples.
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


# Most parameters of most equations.
_PLAIN = frozenset((int, bool, float, str, type(None), np.dtype))


def jaxpr_of(
    invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]
) -> Jaxpr:
    """A jaxpr of these equations, without constants."""
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
    given: Any = (list(invars), list(outvars), list(eqns))
    # Those of JAX count inputs and results, which are others here.
    debug_info = core.DebugInfo("jit", "part of a step", None, None)
    return core.Jaxpr((), *given, effects=effects, debug_info=debug_info)


def closed(jaxpr: Jaxpr) -> ClosedJaxpr:
    """`jaxpr`, which has no constants, in the form that can be called."""
    # One class since JAX 0.12, where `ClosedJaxpr` is on its way out.
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return core.ClosedJaxpr(jaxpr, ())  # pyright: ignore[reportPrivateImportUsage]
