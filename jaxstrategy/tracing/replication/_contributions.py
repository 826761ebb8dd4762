"""The inputs of a jaxpr that go into its outputs element by element.

New parameters are the old ones plus an update, a new running mean is a part of the old
one plus a part of another. What was multiplied as a matrix, summed over a batch or made
by differentiation is something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Literal

from jaxstrategy.tracing._jaxpr_types import Atom, ClosedJaxpr, Equation, Var
from jaxstrategy.tracing.replication._jaxprs import plain

Inputs = frozenset[int]
_NONE: Inputs = frozenset()

_ELEMENTWISE = frozenset(
    ("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "select_n", "copy")
)
_ELEMENTWISE |= {"convert_element_type", "reduce_precision", "optimization_barrier"}
_ELEMENTWISE |= {"clamp", "stop_gradient"}
# It keeps all elements, and stands between each `PerReplica` and the step.
_ELEMENTWISE |= {"squeeze"}

_SCATTERS = frozenset(("scatter", "scatter-add", "scatter-sub", "scatter-mul"))
_SCATTERS |= {"scatter-min", "scatter-max"}


def contributions(jaxpr: ClosedJaxpr) -> list[Inputs]:
    """For each output of `jaxpr` the inputs that go into it."""
    return _contributions(plain(jaxpr), {})


# What is known of nested jaxprs, by their identity; the outer one holds them.
_Known = dict[int, list[Inputs]]


def _contributions(jaxpr: ClosedJaxpr, nested: _Known) -> list[Inputs]:
    if id(jaxpr) in nested:
        return nested[id(jaxpr)]
    known: dict[Var, Inputs] = {
        var: frozenset((index,)) for index, var in enumerate(jaxpr.invars)
    }

    def read(atom: Atom) -> Inputs:
        return _NONE if isinstance(atom, Literal) else known.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if any(operands) and not _is_gradient(eqn):
            outputs = _through(eqn, operands, nested)
            # Not strict: of an operation that is not elementwise there are none.
            known.update(zip(eqn.outvars, outputs, strict=False))
    nested[id(jaxpr)] = [read(atom) for atom in jaxpr.outvars]
    return nested[id(jaxpr)]


def _is_gradient(eqn: Equation) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _through(eqn: Equation, operands: list[Inputs], nested: _Known) -> list[Inputs]:
    name, params = eqn.primitive.name, eqn.params
    # Also an elementwise one, but each of its results has one operand only.
    if name == "optimization_barrier":
        return operands
    if name in _ELEMENTWISE:
        return [_NONE.union(*operands)]
    if name in _SCATTERS:
        return [operands[0]]  # some elements become others, the rest stay
    if name == "cond":
        rest = operands[1:]
        branches = [_called(each, rest, nested) for each in params["branches"]]
        return [_NONE.union(*each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _called(params["jaxpr"], operands, nested)
    if name == "while":
        rest = operands[params["cond_nconsts"] :]
        return _called(params["body_jaxpr"], rest, nested)
    for inner in (params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")):
        if inner is not None and len(plain(inner).invars) == len(operands):
            return _called(inner, operands, nested)
    return []


def _called(
    jaxpr: ClosedJaxpr, operands: Sequence[Inputs], nested: _Known
) -> list[Inputs]:
    """The same for the outputs of a jaxpr that is given these operands.

    Of a loop, this is the first turn; what goes in at all does so there.
    """
    return [
        _NONE.union(*(operands[index] for index in inner))
        for inner in _contributions(plain(jaxpr), nested)
    ]
