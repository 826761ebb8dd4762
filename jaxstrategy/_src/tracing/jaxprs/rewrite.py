"""Jaxprs in which other equations stand for some: `rewritten`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef

from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    closed,
    jaxpr_of,
    with_jaxprs,
)
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree

Rule: TypeAlias = Callable[[Equation], Function | None]
"""Of an equation the function that takes its place; None: it stays.

The function takes the operands and returns a sequence of the results. The equation is
one whose inner jaxprs are rewritten already.
"""

RuleAt: TypeAlias = Callable[[Equation, Rule], Rule]
"""Of an equation, and the rule where it stands, that for it and all that it holds."""

Grouped: TypeAlias = Callable[[Sequence[Equation]], Sequence[Equation]]
"""Equations of a jaxpr, with others in place of some."""


def rewritten(
    jaxpr: Jaxpr,
    rule: Rule,
    axis_sizes: Sequence[tuple[str, int]] = (),
    operands: Rule = lambda _: None,
    rule_at: RuleAt = lambda _, rule: rule,
    grouped: Grouped = lambda eqns: eqns,
) -> Jaxpr:
    """`jaxpr` with all that its equations hold, rewritten equation by equation."""
    return _Rewriting(rule, axis_sizes, operands, rule_at, grouped).of_jaxpr(jaxpr)


def rewritten_function(
    fn: Function, rule: Rule, rule_at: RuleAt = lambda _, rule: rule
) -> Function:
    """`fn`, of which some equations are others.

    It is called where the axes that it names have names.
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
        evaluate = core.jaxpr_as_fun(closed(rewritten(whole, rule, rule_at=rule_at)))
        results = evaluate(*made.consts, *given)
        return jax.tree.unflatten(shapes[0], results)

    return called


@final
class _Rewriting:
    def __init__(
        self,
        rule: Rule,
        axis_sizes: Sequence[tuple[str, int]],
        operands: Rule,
        rule_at: RuleAt,
        grouped: Grouped,
    ) -> None:
        self._rule = rule
        self._operands = operands
        self._rule_at = rule_at
        self._grouped = grouped
        self._axis_sizes = list(axis_sizes)
        self._of_rules: dict[Rule, _Rewriting] = {rule: self}
        # An inner jaxpr may stand in several equations.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._done:
            given = self._grouped(jaxpr.eqns)
            eqns = [new for eqn in given for new in self._of_equation(eqn)]
            effects = frozenset[Any](jaxpr.effects).union(*(e.effects for e in eqns))
            is_same = len(eqns) == len(jaxpr.eqns) and all(
                new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)
            )
            new = jaxpr if is_same else jaxpr.replace(eqns=eqns, effects=effects)
            self._done[id(jaxpr)] = jaxpr, new
        return self._done[id(jaxpr)][1]

    def _of_equation(self, eqn: Any) -> list[Equation]:
        if eqn.primitive.name == "shard_map":
            return [eqn]  # on each device its collectives are those of the devices
        return self._under(self._rule_at(eqn, self._rule))._in_place_of(eqn)

    def _under(self, rule: Rule) -> _Rewriting:
        """The same rewriting, where another rule holds."""
        if rule not in self._of_rules:
            other = _Rewriting(
                rule, self._axis_sizes, self._operands, self._rule_at, self._grouped
            )
            other._of_rules = self._of_rules
            self._of_rules[rule] = other
        return self._of_rules[rule]

    def _in_place_of(self, eqn: Any) -> list[Equation]:
        new = self._with_inner(eqn)
        if (given := self._operands(new)) is not None:
            return self._with_operands(new, given)
        found = self._rule(new)
        return [new] if found is None else self._in_place(new, found)

    def _with_inner(self, eqn: Any) -> Equation:
        params = {
            key: with_jaxprs(value, self.of_jaxpr) for key, value in eqn.params.items()
        }
        if all(params[key] is value for key, value in eqn.params.items()):
            return eqn
        inner = (each.effects for each in params.values() if hasattr(each, "effects"))
        # Axis names are effects: JAX looks for those of an equation's own functions.
        effects = frozenset[Any](eqn.effects).union(
            effect for found in inner for effect in found if hasattr(effect, "name")
        )
        return eqn.replace(params=params, effects=effects)

    def _with_operands(self, eqn: Any, function: Function) -> list[Equation]:
        """The equation of what `function` makes of its operands."""
        fresh = [core.Var(atom.aval) for atom in eqn.invars]
        made = self._in_place(eqn.replace(outvars=fresh), function)
        return [*made, eqn.replace(invars=list(fresh))]

    def _in_place(self, eqn: Any, function: Function) -> list[Equation]:
        """The equations of `function`, which make what `eqn` made."""
        types = [_type(atom) for atom in eqn.invars]
        references = [i for i, atom in enumerate(eqn.invars) if _is_reference(atom)]

        def called(*operands: jax.Array, function: Function = function) -> list[Any]:
            own = {i: jax.new_ref(operands[i]) for i in references}
            return list(function(*(own.get(i, x) for i, x in enumerate(operands))))

        made: Any = jax.make_jaxpr(called, axis_env=self._axis_sizes)(*types)
        if _constants(made):
            # In a function of its own they need no inputs of the jaxpr here.
            wrapped = functools.partial(called, function=jax.jit(function))
            made = jax.make_jaxpr(wrapped, axis_env=self._axis_sizes)(*types)
        names: dict[Atom, Atom] = dict(zip(made.jaxpr.invars, eqn.invars, strict=True))
        # The equation works on references that there are.
        eqns = made.jaxpr.eqns[len(references) :]
        for each in made.jaxpr.eqns[: len(references)]:
            names[each.outvars[0]] = names[each.invars[0]]
        return _renamed(eqns, made.jaxpr.outvars, names, eqn)


def _renamed(
    eqns: Sequence[Any], results: Sequence[Atom], names: dict[Atom, Atom], eqn: Any
) -> list[Equation]:
    """`eqns` under other names, so that they make what `eqn` made."""
    wanted = [
        (atom, var)
        for atom, var in zip(results, eqn.outvars, strict=True)
        if not isinstance(var, DropVar)
    ]
    made = {var for each in eqns for var in each.outvars}
    # One that is made twice, or not here, needs an equation of its own.
    copied: list[tuple[Atom, Atom]] = []
    for atom, var in wanted:
        if isinstance(atom, Literal) or atom not in made or atom in names:
            copied.append((atom, var))
        else:
            names[atom] = var

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    found: list[Equation] = [
        each.replace(
            invars=list(map(read, each.invars)),
            outvars=[names.get(var, var) for var in each.outvars],
            source_info=eqn.source_info,
        )
        for each in eqns
    ]
    return found + [_copy(read(atom), var, eqn) for atom, var in copied]


def _copy(atom: Atom, var: Var, eqn: Any) -> Equation:
    made: Any = jax.make_jaxpr(lambda x: lax.copy_p.bind(x))(_type(atom))
    (copy,) = made.jaxpr.eqns
    return copy.replace(invars=[atom], outvars=[var], source_info=eqn.source_info)


def _is_reference(atom: Atom) -> bool:
    return isinstance(atom.aval, AbstractRef)


def _constants(closed: Any) -> Sequence[object]:
    return closed.consts


def _type(atom: Atom) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def function_of(eqn: Any) -> Function:
    """What an equation computes of its operands."""
    # Each operand is one of its own, or one that is given twice had one derivative.
    invars = [core.Var(atom.aval) for atom in eqn.invars]
    outvars = [core.Var(var.aval) for var in eqn.outvars]
    alone = eqn.replace(invars=list(invars), outvars=list(outvars))
    return core.jaxpr_as_fun(closed(jaxpr_of(invars, [alone], outvars)))


def references(eqn: Equation) -> list[int]:
    """The operands that are references, by place."""
    return [i for i, x in enumerate(eqn.invars) if isinstance(x.aval, AbstractRef)]


def on_contents(function: Function, places: Sequence[int]) -> Function:
    """`function` of what some references hold; it returns what they hold then, last."""

    def called(*operands: Leaf) -> list[jax.Array]:
        own = {place: jax.new_ref(operands[place]) for place in places}
        results = function(*(own.get(i, x) for i, x in enumerate(operands)))
        return [*results, *(own[place][...] for place in places)]

    return called


def with_contents(function: Function, places: Sequence[int]) -> Function:
    """A function of references, of one `on_contents`."""

    def called(*operands: Leaf) -> Sequence[jax.Array]:
        held = [operands[place] for place in places]
        given = [x[...] if i in places else x for i, x in enumerate(operands)]
        results = list(function(*given))
        count = len(results) - len(places)
        for reference, content in zip(held, results[count:], strict=True):
            reference[...] = content
        return results[:count]

    return called
