"""Which values of a step are provably equal on all replicas.

A forward data-flow pass over the jaxpr of one replica's step. Every value is either
*replicated* (the same on all replicas, proved) or *varying*. Values start out as their
arguments do; `axis_index` is varying; a reduction or gather over the replica axis is
replicated; everything else is varying if anything it is computed from is. Control flow
and nested functions are entered, loops until nothing changes. What the pass does not
know it calls varying: it may be pessimistic, never wrong.

A varying value is represented by the equation it became varying at (an argument by the
string `"argument"`), a replicated one by None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

# None: replicated. Anything else: varying, and since where.
Origin = Any
ARGUMENT = "argument"


def origins(jaxpr: Jaxpr, inputs: Sequence[Origin], axis_name: str) -> list[Origin]:
    """For each output of `jaxpr`, None if it is replicated, else where it varied first.

    Args:
      jaxpr: one replica's computation, without constants.
      inputs: for each input the same as is returned for the outputs.
      axis_name: the mesh axis of the replicas.
    """
    return _Analysis(axis_name).of(jaxpr, list(inputs))


def plain(jaxpr: Any) -> Jaxpr:
    """`jaxpr` without its constants; before JAX 0.12 those are a class of their own."""
    return getattr(jaxpr, "jaxpr", jaxpr)


class _Cell:
    """What a mutable reference holds. One object however many names it has."""

    def __init__(self, content: Origin) -> None:
        self.content = content


class _Analysis:
    def __init__(self, axis_name: str) -> None:
        self.axis_name = axis_name
        self.changes = 0  # how often a reference's content became varying

    def of(self, jaxpr: Jaxpr, inputs: list[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return None if isinstance(atom, Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            rule = _RULES.get(eqn.primitive.name, _other)
            for var, result in zip(eqn.outvars, rule(self, eqn, operands), strict=True):
                known[var] = result
        return [read(atom) for atom in jaxpr.outvars]

    def write(self, cell: _Cell, origin: Origin) -> None:
        if cell.content is None and origin is not None:
            cell.content = origin
            self.changes += 1

    def mentions_replicas(self, eqn: Any) -> bool:
        """Whether a collective equation works across the replica axis."""
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = named if isinstance(named, (tuple, list)) else (named,)
        return self.axis_name in names


Rule = Callable[[_Analysis, Any, list[Any]], list[Any]]


def _first(states: Sequence[Any]) -> Origin:
    """The first varying state, if any; a reference counts as what it holds."""
    for state in states:
        content = state.content if isinstance(state, _Cell) else state
        if content is not None:
            return content
    return None


def _all(eqn: Any, origin: Origin) -> list[Origin]:
    return [origin] * len(eqn.outvars)


def _varying(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    """Differs between replicas whatever it is given."""
    return _all(eqn, eqn)


def _axis_index(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    return _all(eqn, eqn if analysis.mentions_replicas(eqn) else None)


def _equalise(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    """A collective whose result is the same on all members of its group."""
    if not analysis.mentions_replicas(eqn):
        return _collective_elsewhere(eqn, operands)
    if eqn.params.get("axis_index_groups") is not None:
        return _all(eqn, eqn)  # equal inside a group, not between groups
    return _all(eqn, None)


def _scatter(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    """A collective that gives each member another part."""
    if not analysis.mentions_replicas(eqn):
        return _collective_elsewhere(eqn, operands)
    return _all(eqn, eqn)


def _collective_elsewhere(eqn: Any, operands: list[Any]) -> list[Any]:
    if len(operands) == len(eqn.outvars):  # psum of several operands at once
        return [_first([operand]) for operand in operands]
    return _all(eqn, _first(operands))


def _call(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    """A function called once: entered."""
    (jaxpr,) = (eqn.params[key] for key in _CALLEES if key in eqn.params)
    return _enter(analysis, jaxpr, operands)


# Where the primitives that call a function once keep it.
_CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _enter(analysis: _Analysis, jaxpr: Any, operands: list[Any]) -> list[Any]:
    return analysis.of(plain(jaxpr), operands)


def _cond(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    predicate, operands = operands[0], operands[1:]
    cells = [state for state in operands if isinstance(state, _Cell)]
    results = [
        _enter(analysis, branch, list(operands)) for branch in eqn.params["branches"]
    ]
    if predicate is not None:  # replicas may take different branches
        for cell in cells:
            analysis.write(cell, predicate)
        return _all(eqn, predicate)
    return [_first(versions) for versions in zip(*results, strict=True)]


def _while(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:n_cond]
    body_consts = operands[n_cond : n_cond + n_body]
    carry = operands[n_cond + n_body :]

    def turn(carry: list[Any]) -> list[Any]:
        (goes_on,) = _enter(analysis, params["cond_jaxpr"], cond_consts + carry)
        after = _enter(analysis, params["body_jaxpr"], body_consts + carry)
        if goes_on is not None:  # replicas may stop at different turns
            for cell in body_consts:
                if isinstance(cell, _Cell):
                    analysis.write(cell, goes_on)
            return [goes_on] * len(after)
        return after

    return _until_stable(analysis, turn, carry)


def _scan(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    inner = plain(eqn.params["jaxpr"])
    # The operands are constants, carry and xs; the results are carry and ys. Their
    # numbers are named differently from version to version, but only xs and ys have
    # one dimension more outside the loop than inside it.
    n_carry = _count_equal_rank(eqn.outvars, inner.outvars)
    n_same = _count_equal_rank(eqn.invars, inner.invars)
    consts, xs = operands[: n_same - n_carry], operands[n_same:]
    ys: list[Any] = []

    def turn(carry: list[Any]) -> list[Any]:
        after = analysis.of(inner, consts + carry + xs)
        ys[:] = after[n_carry:]
        return after[:n_carry]

    carry = _until_stable(analysis, turn, operands[n_same - n_carry : n_same])
    return carry + ys


def _count_equal_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


def _until_stable(
    analysis: _Analysis, turn: Callable[[list[Any]], list[Any]], carry: list[Any]
) -> list[Any]:
    # Values only ever go from replicated to varying, so this ends.
    while True:
        changes = analysis.changes
        after = [_join(old, new) for old, new in zip(carry, turn(carry), strict=True)]
        if after == carry and analysis.changes == changes:
            return carry
        carry = after


def _join(old: Any, new: Any) -> Any:
    return new if old is None else old


def _new_ref(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    return [_Cell(_first(operands))]


def _get(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    return [_first(operands)]  # what it holds, or an index that varies


def _swap(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    cell, written = operands[0], operands[1:]
    before = _first(operands)
    analysis.write(cell, _first(written))
    return _all(eqn, before)


def _other(analysis: _Analysis, eqn: Any, operands: list[Any]) -> list[Any]:
    """Any other operation: varying if an operand is, or if it might look around."""
    hides_something = any(
        inner.primitive.name in _LOOKS_AROUND
        for jaxpr in _inner_jaxprs(eqn.params)
        for inner in _all_eqns(jaxpr)
    )
    origin = eqn if hides_something else _first(operands)
    for cell in operands:
        if isinstance(cell, _Cell):  # it may write there
            analysis.write(cell, origin)
    return _all(eqn, origin)


def _inner_jaxprs(value: Any) -> Iterator[Jaxpr]:
    if hasattr(value, "eqns"):
        yield plain(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inner_jaxprs(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _inner_jaxprs(item)


def _all_eqns(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _inner_jaxprs(eqn.params):
            yield from _all_eqns(inner)


_EQUALISING = ("psum", "psum_invariant", "pmax", "pmin", "all_gather")
_EQUALISING += ("all_gather_invariant", "pbroadcast")
_SCATTERING = ("ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter")
_SCATTERING += ("pgather", "psend", "precv")
# Callbacks run on a host whose state we cannot see, once per device.
_OUTSIDE = ("pure_callback", "io_callback", "ffi_call", "infeed", "rng_uniform")
# Python functions that are traced later, and might do anything then.
_OUTSIDE += ("call_hi_primitive",)
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
_CALLS += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map")
_LOOKS_AROUND = frozenset(("axis_index", *_EQUALISING, *_SCATTERING, *_OUTSIDE))

_RULES: dict[str, Rule] = {
    "axis_index": _axis_index,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "get": _get,
    "swap": _swap,
    "addupdate": _swap,
    **dict.fromkeys(
        ("new_ref", "ref", "mutable_array", "core_mutable_array"), _new_ref
    ),
    **dict.fromkeys(("freeze", "ref_freeze", "free_ref"), _get),
    **dict.fromkeys(_EQUALISING, _equalise),
    **dict.fromkeys(_SCATTERING, _scatter),
    **dict.fromkeys(_OUTSIDE, _varying),
    **dict.fromkeys(_CALLS, _call),
}
