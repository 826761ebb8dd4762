"""The values of a step that are provably equal on all replicas.

A forward data-flow pass over the jaxpr of one replica's step. Every value has a level:

- constant: it depends on no argument,
- *same*: equal on all replicas, computed from arguments that are,
- *reduced*: equal on all replicas, computed from the result of a reduction,
- *varying*: anything else, which may differ between replicas.

Values start out as their arguments do; `axis_index` varies; a reduction or gather over
the replica axis is equal everywhere; an operation that computes from its operands and
does nothing else has the highest level of those. Control flow and nested functions are
entered, loops until nothing changes. What the pass does not know it calls varying: it
may be pessimistic, never wrong, as long as the operations themselves give the same bits
on every device for the same bits.

On the way the pass notes every collective over the replicas, and whether a varying
value decides that it is reached at all.

Each nested function is gone through once per combination of levels of its operands,
however often it is called, so the time is linear in what JAX traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax.extend.core import Jaxpr, Primitive
from jax.ref import AbstractRef
from jax.sharding import Mesh

from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.tracing._jaxpr_types import Atom, Equation
from jaxstrategy.tracing.replication import (
    _collectives,
    _control,
    _derived,
    _identity,
    _pure,
    _unknown,
)
from jaxstrategy.tracing.replication._analysis import Analysis, Frame, Rule
from jaxstrategy.tracing.replication._collective_table import Effect, named
from jaxstrategy.tracing.replication._levels import (
    SAME,
    Findings,
    HeldState,
    Known,
    Level,
    Replication,
    computed,
    content_of,
    for_all,
    join,
    level_of,
    not_reduced,
    numbered,
    varying_since,
)


def analyse(
    jaxpr: Jaxpr,
    varies: Sequence[bool],
    axes: str | Sequence[str],
    replicas: int,
    unpacking: int = 0,
    mesh: Mesh | None = None,
) -> Findings:
    """The findings about each output of `jaxpr`, and its collectives.

    Args:
      jaxpr: one replica's computation, without constants.
      varies: for each input, whether it, or what the reference holds, may differ
        between replicas.
      axes: the mesh axes of the replicas, or the one there is.
      replicas: how many replicas there are.
      unpacking: how many equations at the start only unpack arguments.
      mesh: where the replicas are, if that is known: what an operation without a rule
        does depends on it.
    """
    analysis = Analysis(axes, replicas, Rules(), mesh)
    findings = analysis.of(jaxpr, _inputs(jaxpr, varies), unpacking)
    return findings if replicas > 1 else findings.of_one_replica()


def varying(
    jaxpr: Jaxpr, varies: Sequence[bool], replicas: Replicas, unpacking: int = 0
) -> Callable[[Atom], bool]:
    """Whether a value of `jaxpr`, at its top level, may differ between replicas.

    Args:
      jaxpr: as for `analyse`.
      varies: likewise.
      replicas: those that compute it, more than one.
      unpacking: as for `analyse`.
    """
    axes, count = replicas.collective_axes, replicas.count
    analysis = Analysis(axes, count, Rules(), replicas.mesh)
    frame = analysis.passed(jaxpr, _inputs(jaxpr, varies), unpacking)
    return lambda atom: level_of(frame.read(atom)) == Level.VARYING


def _inputs(jaxpr: Jaxpr, varies: Sequence[bool]) -> list[Known]:
    states = [
        Replication(Level.VARYING, index) if differs else SAME
        for index, differs in enumerate(varies)
    ]
    return [
        HeldState(state) if isinstance(var.aval, AbstractRef) else state
        for var, state in zip(jaxpr.invars, states, strict=True)
    ]


class Rules(dict[Primitive, Rule]):
    """The rule of each primitive."""

    def __missing__(self, primitive: Primitive) -> Rule:
        rule = self[primitive] = _rule_of(primitive)
        return rule


def _rule_of(primitive: Primitive) -> Rule:
    is_named = _pure.is_named_by_jax(primitive)
    if is_named and (rule := _RULES.get(primitive.name)):
        return rule
    if _pure.is_declared(primitive) or is_named and primitive.name in _pure.PURE:
        return _unknown.pure
    return _derived.also(_unknown.other, _derived.forward)


def _comparison(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    state = not_reduced(computed(eqn, operands))
    ids = _identity.compared_ids(frame, eqn)
    if ids is not None and state is not None and state.varies:
        is_one = len(set(ids)) == 1
        state = SAME if is_one else dataclasses.replace(state, classes=numbered(ids))
    return for_all(eqn, state)


def _select(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    choice, *cases = operands
    if level_of(choice) == Level.VARYING and _identity.are_one(frame, eqn.invars[1:]):
        # Whichever case a replica chooses, it is the same value.
        return for_all(eqn, computed(eqn, cases))
    # What is chosen by the result of a reduction is not itself such a result.
    return for_all(eqn, computed(eqn, [not_reduced(content_of(choice)), *cases]))


def _hi_primitive(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    found = _control.hi_primitive(frame, eqn, operands)
    return _unknown.outside(frame, eqn, operands) if found is None else found


def _empty(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """Whatever lies in the memory of each device."""
    (result,) = eqn.outvars
    # Without elements there is nothing that could differ.
    return [varying_since(eqn) if 0 not in result.aval.shape else None]


# References.


def _empty_ref(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    return [HeldState(varying_since(eqn))]


def _new_ref(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    return [HeldState(join(operands))]


def _get(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    # What it holds, unless an index varies.
    return for_all(eqn, computed(eqn, operands))


def _swap(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    cell, written = operands[0], operands[1:]
    before = computed(eqn, operands)
    # Without indices that are computed, a part of the reference's shape is all of it.
    (replaced,), (reference, *others) = eqn.outvars, eqn.invars
    if len(others) == 1 and replaced.aval.shape == reference.aval.shape:
        frame.overwrite(cell, computed(eqn, written))
    else:
        frame.write(cell, computed(eqn, written))
    return for_all(eqn, before)


def _addupdate(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    frame.write(operands[0], computed(eqn, operands[1:]))
    return []


# The rule of each effect that a collective can have. Of others nothing is known.
_OF_EFFECTS: dict[Effect, Rule] = {
    Effect.SUM: _collectives.summing,
    Effect.EXTREME: _collectives.reducing,
    Effect.GATHER: _collectives.gathering,
    Effect.BROADCAST: _collectives.gathering,
    Effect.PERMUTE: _collectives.permuting,
    Effect.SCATTER: _collectives.scattering,
    Effect.SUM_SCATTER: _collectives.scattering,
}
_FOLDING = ("reduce_sum", "reduce_max", "reduce_min")
# Callbacks run on a host whose state we cannot see, once per device.
_OUTSIDE = ("pure_callback", "io_callback", "buffer_callback", "ffi_call")
_OUTSIDE += ("rng_uniform",)
# A kernel writes as much of its results as it likes.
_OUTSIDE += ("pallas_call", "mpmd_map", "core_map", "tpu_custom_call")
_CALLS = ("jit", "call", "closed_call", "eval_jaxpr", "remat2")
_CALLS += ("composite",)
_CALLS += ("custom_partitioning", "compute_on", "xla_metadata_call")
_CALLS += ("linear_call", "remat_opt")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
_COMPARISONS += ("eq_to", "le_to", "lt_to")

_RULES: dict[str, Rule] = {
    **{name: rule for e, rule in _OF_EFFECTS.items() for name in named(e)},
    **dict.fromkeys(_FOLDING, _collectives.folding),
    "axis_index": _collectives.axis_index,
    "shard_map": _control.mapped,
    "cond": _control.branching,
    "while": _control.while_loop,
    "scan": _control.scan,
    "custom_linear_solve": _derived.also(_control.linear_solve, _derived.forward),
    "custom_jvp_call": _derived.also(_control.call, _derived.forward),
    "custom_vjp_call": _derived.also(_control.call, _derived.backward),
    "custom_vmap_call": _derived.also(_control.call, _derived.batched),
    "call_hi_primitive": _hi_primitive,
    "new_ref": _new_ref,
    "empty_ref": _empty_ref,
    "get": _get,
    "freeze": _get,
    "free_ref": _get,
    "swap": _swap,
    "addupdate": _addupdate,
    "select_n": _select,
    "concatenate": _collectives.joining,
    "reshape": _collectives.reshaping,
    "mul": _collectives.scaling,
    "div": _collectives.scaling,
    **dict.fromkeys(("empty", "empty2"), _empty),
    "run_state": _control.run_state,
    "accum_grad_in_ref": _addupdate,
    **dict.fromkeys(("optimization_barrier", "device_put", "pvary"), _collectives.each),
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(_OUTSIDE, _unknown.outside),
    **dict.fromkeys(_CALLS, _control.call),
}
