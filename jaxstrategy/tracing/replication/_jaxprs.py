"""Ways through a jaxpr and those that its equations hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxstrategy.tracing._jaxpr_types import Atom, ClosedJaxpr, Equation, Jaxpr, Var


def plain(jaxpr: ClosedJaxpr) -> Jaxpr:
    """`jaxpr` without its constants; before JAX 0.12 those are a class of their own."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def hidden(params: object) -> Iterator[Equation]:
    """All equations in the jaxprs among the parameters of an equation."""
    seen: set[int] = set()
    for jaxpr in inner_jaxprs(params):
        yield from all_eqns(jaxpr, seen)


def all_eqns(jaxpr: Jaxpr, seen: set[int] | None = None) -> Iterator[Equation]:
    """All equations of `jaxpr`, those inside others too, each once.

    Args:
      jaxpr: what to go through.
      seen: the ids of jaxprs to leave out; those gone through are added.
    """
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
