"""A jaxpr in which other equations stand for some: `rewritten`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
from jax.extend import core
from jax.extend.core import DropVar, Literal

from jaxstrategy.tracing._jaxpr_types import Atom, Equation, Jaxpr
from jaxstrategy.tracing.replication._jaxprs import closed, plain
from jaxstrategy.values._types import Function, Leaf, PyTree

Rule: TypeAlias = Callable[[Equation], Function | None]
"""Of an equation the function that takes its place; None: it stays.

The function takes the operands and returns a sequence of the results.
"""

Parameters: TypeAlias = Callable[[Equation], dict[str, Any]]
"""Of an equation that stays the parameters that it has instead."""


def _same_parameters(_: Equation) -> dict[str, Any]:
    return {}


def rewritten(
    jaxpr: Jaxpr,
    rule: Rule,
    axis_sizes: Sequence[tuple[str, int]] = (),
    parameters: Parameters = _same_parameters,
) -> Jaxpr:
    """`jaxpr` with all that its equations hold, rewritten equation by equation.

    Args:
      jaxpr: without constants.
      rule: says which equations stay.
      axis_sizes: the axes that the functions of the rule may name, besides those that
        have names where this is called.
      parameters: says which parameters of equations that stay are others.
    """
    return _Rewriting(rule, axis_sizes, parameters).of_jaxpr(jaxpr)


def rewritten_function(fn: Function, rule: Rule) -> Function:
    """`fn`, of which some equations are others.

    It is called where the axes that it names have names.

    Args:
      fn: returns a pytree of arrays.
      rule: says which equations stay.
    """

    def called(*given: Leaf) -> PyTree:
        shapes: list[PyTree] = []

        def flat(*given: Leaf) -> list[jax.Array]:
            leaves, structure = jax.tree.flatten(fn(*given))
            shapes.append(structure)
            return leaves

        made: Any = jax.make_jaxpr(flat)(*given)
        jaxpr = made.jaxpr
        whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        evaluate = core.jaxpr_as_fun(closed(rewritten(whole, rule)))
        results = evaluate(*made.consts, *given)
        return jax.tree.unflatten(shapes[0], results)

    return called


@final
class _Rewriting:
    def __init__(
        self,
        rule: Rule,
        axis_sizes: Sequence[tuple[str, int]],
        parameters: Parameters,
    ) -> None:
        self._rule = rule
        self._parameters = parameters
        self._axis_sizes = list(axis_sizes)
        # An inner jaxpr may stand in several equations.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._done:
            eqns = [new for eqn in jaxpr.eqns for new in self._of_equation(eqn)]
            effects = frozenset[Any](jaxpr.effects).union(*(e.effects for e in eqns))
            is_same = len(eqns) == len(jaxpr.eqns) and all(
                new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)
            )
            new = jaxpr if is_same else jaxpr.replace(eqns=eqns, effects=effects)
            self._done[id(jaxpr)] = jaxpr, new
        return self._done[id(jaxpr)][1]

    def _of_equation(self, eqn: Any) -> list[Equation]:
        found = self._rule(eqn)
        return [self._with_inner(eqn)] if found is None else self._in_place(eqn, found)

    def _with_inner(self, eqn: Any) -> Equation:
        params = {key: self._of_parameter(value) for key, value in eqn.params.items()}
        params.update(self._parameters(eqn))
        if all(params[key] is value for key, value in eqn.params.items()):
            return eqn
        inner = (each.effects for each in params.values() if hasattr(each, "effects"))
        # Axis names are effects: JAX looks for those of an equation's own functions.
        effects = frozenset[Any](eqn.effects).union(
            effect for found in inner for effect in found if hasattr(effect, "name")
        )
        return eqn.replace(params=params, effects=effects)

    def _of_parameter(self, value: Any) -> Any:
        several: Any = value
        if isinstance(value, (tuple, list)) and any(map(_is_jaxpr, several)):
            new = [self._of_parameter(each) for each in several]
            is_same = all(a is b for a, b in zip(new, value, strict=True))
            return value if is_same else type(several)(new)
        if not _is_jaxpr(value):
            return value
        inner = plain(value)
        new = self.of_jaxpr(inner)
        if new is inner:
            return value
        return new if inner is value else several.replace(jaxpr=new)

    def _in_place(self, eqn: Any, function: Function) -> list[Equation]:
        """The equations of `function`, which make what `eqn` made."""
        types = [_type(atom) for atom in eqn.invars]

        def called(*operands: jax.Array) -> list[jax.Array]:
            return list(function(*operands))

        made: Any = jax.make_jaxpr(called, axis_env=self._axis_sizes)(*types)
        if _constants(made):
            # In a function of its own they need no inputs of the jaxpr here.
            wrapped = jax.jit(called)
            made = jax.make_jaxpr(wrapped, axis_env=self._axis_sizes)(*types)
        names: dict[Atom, Atom] = dict(zip(made.jaxpr.invars, eqn.invars, strict=True))
        return _renamed(made.jaxpr, names, eqn)


def _renamed(jaxpr: Any, names: dict[Atom, Atom], eqn: Any) -> list[Equation]:
    """The equations of `jaxpr` under other names, the last of them those of `eqn`."""
    results = dict(zip(jaxpr.outvars, eqn.outvars, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    found: list[Equation] = []
    for each in jaxpr.eqns:
        for var in each.outvars:
            if var in results and not isinstance(results[var], DropVar):
                names[var] = results[var]
        new: Any = each
        found.append(
            new.replace(
                invars=list(map(read, each.invars)),
                outvars=[names.get(var, var) for var in each.outvars],
                source_info=eqn.source_info,
            )
        )
    return found


def _constants(closed: Any) -> Sequence[object]:
    return closed.consts


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns")


def _type(atom: Atom) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
