"""The rule of each primitive, and `analyse`: which values are equal on all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import Jaxpr, Primitive
from jax.ref import AbstractRef
from jax.sharding import Mesh

from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs import (
    Effect,
    Equation,
    effect_of,
    inner_jaxprs,
    primitives_with,
)
from jaxstrategy._src.tracing.replication import (
    analysis as _analysis,
    primitives,
)
from jaxstrategy._src.tracing.replication.analysis import (
    Analysis,
    Frame,
    Rule,
    Transform,
    Types,
    gather_before,
    gathers_sums,
    is_mean,
    is_share,
)
from jaxstrategy._src.tracing.replication.types import (
    SAME,
    Collective,
    Findings,
    Level,
    RefState,
    Replication,
    State,
    as_classes,
    content_of,
    for_each_result,
    join,
    level_of,
    not_reduced,
)
from jaxstrategy._src.values.arrays import Function


def per_operand(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """One result for each operand."""
    if len(operands) != len(eqn.outvars):
        return for_each_result(eqn, frame.computed(eqn, operands))
    return [frame.computed(eqn, (operand,)) for operand in operands]


def axis_index(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """The id of the replica varies; an index along another axis does not."""
    varies = frame.analysis.mentions_replicas(eqn)
    return for_each_result(eqn, frame.varying_since(eqn) if varies else None)


def reducing(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A reduction, whose result is the same on all members of a group."""
    if not frame.analysis.mentions_replicas(eqn):
        return per_operand(frame, eqn, operands)
    before = _summed_before(frame, eqn, operands)
    frame.collectives.append(_collective_of(frame, eqn, before))
    if eqn.params.get("axis_index_groups") is None:
        reduced = _reduced(frame, eqn)
        return [None if operand is None else reduced for operand in operands]
    # On CPUs XLA adds in the order of the replicas, on accelerators along the links
    # between the devices of a group. For two numbers it makes no difference.
    on_cpu = frame.analysis.is_on_cpu
    return [
        _grouped(
            frame,
            eqn,
            content_of(operand),
            Level.REDUCED,
            on_cpu or not jnp.issubdtype(atom.aval.dtype, jnp.inexact),
        )
        for atom, operand in zip(eqn.invars, operands, strict=True)
    ]


def _reduced(frame: Frame, eqn: Equation) -> Replication:
    """The very result of a reduction."""
    return Replication(Level.REDUCED, None, frame.site(eqn), is_direct=True)


def _summed_before(
    frame: Frame, eqn: Equation, operands: list[State]
) -> Replication | None:
    """The operand that `eqn` sums a second time, unless for a mean."""
    if effect_of(eqn) not in (Effect.SUM, Effect.SUM_SCATTER):
        return None  # repeating it changes nothing
    state = join(operands)
    if state is not None and state.varies:
        state = state.part
    if level_of(state) != Level.REDUCED or is_mean(frame, eqn):
        return None
    return state


def _collective_of(
    frame: Frame, eqn: Equation, before: Replication | None = None
) -> Collective:
    groups = eqn.params.get("axis_index_groups")
    groups = None if groups is None else tuple(map(tuple, groups))
    return Collective(frame.site(eqn), reduced_before=before, groups=groups)


def gathering(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A collective after which all members of a group have the same."""
    if not frame.analysis.mentions_replicas(eqn):
        return per_operand(frame, eqn, operands)
    frame.collectives.append(_collective_of(frame, eqn))
    of_sums = gathers_sums(frame, eqn)
    whole = _reduced(frame, eqn)
    if eqn.params.get("axis_index_groups") is not None:
        state = _grouped(frame, eqn, join(operands), Level.SAME)
        return [whole if of_sums and state is SAME else state]
    return for_each_result(eqn, whole if of_sums else SAME)


def folding(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A sum or extreme along an array's axes, which may have been gathered."""
    state = frame.computed(eqn, operands)
    if state is SAME and (origin := gather_before(frame, eqn)) is not None:
        if frame.analysis.mentions_replicas(origin):
            return [_reduced(frame, eqn)]
    return [state]


def permuting(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """Each replica has the value of another, or zeros."""
    if not frame.analysis.mentions_replicas(eqn):
        return per_operand(frame, eqn, operands)
    sender = {target: source for source, target in eqn.params["perm"]}
    replicas = range(frame.analysis.replicas)
    if any(replica not in sender for replica in replicas):
        return scattering(frame, eqn, operands)
    frame.collectives.append(_collective_of(frame, eqn))
    return [
        _sent(frame, eqn, content_of(operand), [sender[r] for r in replicas])
        for operand in operands
    ]


def _sent(
    frame: Frame, eqn: Equation, operand: Replication | None, senders: list[int]
) -> Replication | None:
    """The type of `operand` when each replica has that of its sender."""
    state = frame.computed(eqn, (operand,))
    if state is None or not state.varies:
        return state
    classes = operand.classes if operand is not None else None
    if classes is None:
        return frame.varying_since(eqn)
    sent = as_classes([classes[sender] for sender in senders])
    return dataclasses.replace(frame.varying_since(eqn), classes=sent)


def _grouped(
    frame: Frame,
    eqn: Equation,
    operand: Replication | None,
    level: Level,
    is_exact: bool = True,
) -> Replication:
    """The result of each group, made of its members' values.

    Two groups have the same result if their members, in order, have the same values:
    so a sum inside groups, and then one across them, is the same everywhere.
    """
    groups = [tuple(group) for group in eqn.params["axis_index_groups"]]
    replicas = range(frame.analysis.replicas)
    is_sum = level is Level.REDUCED
    if operand is not None and operand.varies:
        classes = operand.classes or tuple(replicas)
    elif is_sum and len(groups) > 1:
        # Equal in groups of one size, but reductions in groups are meant to vary.
        classes = tuple(replicas)
    else:
        classes = (0,) * len(replicas)
    results = []
    for replica in replicas:
        group = next(group for group in groups if replica in group)
        order = None if is_exact or len(group) < 3 else group
        results.append((order, *(classes[member] for member in group)))
    if len(set(results)) == 1:
        return (
            Replication(level, None, frame.site(eqn), is_direct=True)
            if is_sum
            else SAME
        )
    return dataclasses.replace(frame.varying_since(eqn), classes=as_classes(results))


def joining(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """Concatenation: remembers a part that was reduced."""
    state = frame.computed(eqn, operands)
    if state is not None and state.varies:
        parts = [
            x and (x if x.level is Level.REDUCED else x.part)
            for x in map(content_of, operands)
        ]
        if reduced := next(filter(None, parts), None):
            state = dataclasses.replace(state, part=reduced)
    return [state]


def reshaping(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """The same elements in another shape."""
    state, before = frame.computed(eqn, operands), content_of(operands[0])
    if before is not None and before.part is not None and state is not None:
        state = dataclasses.replace(state, part=before.part)
    return [state]


def scattering(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A collective that gives each member another part."""
    if not frame.analysis.mentions_replicas(eqn):
        return per_operand(frame, eqn, operands)
    before = _summed_before(frame, eqn, operands)
    frame.collectives.append(_collective_of(frame, eqn, before))
    # Even if the operand is equal on all: each gets another part of it.
    return for_each_result(eqn, frame.varying_since(eqn))


def scaling(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A product or quotient."""
    state = frame.computed(eqn, operands)
    if level_of(state) == Level.REDUCED and is_share(frame, eqn):
        # A share to be summed, no longer the reduced value itself. But a sum divided by
        # the number of replicas is a mean.
        if not any(isinstance(s, Replication) and s.is_direct for s in operands):
            return [not_reduced(state)]
    return [state]


# Derivatives of derivatives are analysed. A derivative rule often calls the function
# itself, so that there must be a limit.
_ORDERS = 2


# Under `jax.grad` around `run`, JAX replaces a function by its own rule for derivatives
# or `vmap`. The same program serves both, so results that count as equal on all
# replicas must be so under these rules, too.
def also(rule: Rule, transform: Transform) -> Rule:
    """`rule`, applied to the equation and to what it is under `transform`."""

    def both(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
        results = rule(frame, eqn, operands)
        if all(level_of(state) == Level.VARYING for state in results):
            return results
        if frame.analysis.order == _ORDERS:
            return results
        others = _transformed(frame, eqn, operands, transform)
        return [
            other
            if level_of(other) == Level.VARYING and not isinstance(result, RefState)
            else result
            for result, other in zip(results, others, strict=True)
        ]

    return both


def _transformed(
    frame: Frame, eqn: Equation, operands: list[State], transform: Transform
) -> list[State]:
    """The type of each result of `eqn` under `transform`."""
    unknown: list[State] = [frame.varying_since(eqn)] * len(eqn.outvars)
    if any(isinstance(state, RefState) for state in operands):
        return unknown
    try:
        jaxpr = frame.analysis.transformed(eqn, transform)
    except NotImplementedError:  # nor can the step be transformed
        return [None] * len(eqn.outvars)
    except Exception:  # raised by the user's code
        return unknown
    pairs = zip(eqn.invars, operands, strict=True)
    states = [state for atom, state in pairs if not isinstance(atom, core.Literal)]
    copies = len(jaxpr.invars) // len(states) if states else 1
    frame.analysis.order += 1
    # Collectives of a rule are in no program unless it is differentiated.
    outputs, _ = frame.call(jaxpr, states * copies, eqn)
    frame.analysis.order -= 1
    is_used = [not isinstance(var, core.DropVar) for var in eqn.outvars]
    count = sum(is_used)
    results = iter([join(outputs[i::count]) for i in range(count)])
    return [next(results) if used else None for used in is_used]


def forward(function: Function, types: Types) -> tuple[Function, Types]:
    """The results and their tangents."""

    def pushed(*inputs: Any) -> Any:
        primals, tangents = inputs[: len(types)], inputs[len(types) :]
        tangents = [_tangent(p, t) for p, t in zip(primals, tangents, strict=True)]
        out, moved = jax.jvp(function, primals, tuple(tangents))
        pairs = zip(out, moved, strict=True)
        return [*out, *(p if _is_discrete(p) else t for p, t in pairs)]

    return pushed, [*types, *types]


def _tangent(primal: jax.Array, tangent: jax.Array) -> jax.Array | np.ndarray:
    # `jax.jvp` refuses any other tangent of integers and bools (JAX 0.10 and 0.12).
    zero = np.zeros(primal.shape, jax.dtypes.float0)
    return zero if _is_discrete(primal) else tangent


def _is_discrete(array: jax.Array) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact)


def backward(function: Function, types: Types) -> tuple[Function, Types]:
    """The results of a forward pass.

    The gradient needs no proof: JAX sums that of a mirrored argument over the replicas.
    """
    return lambda *primals: jax.vjp(function, *primals)[0], types


def batched(function: Function, types: Types) -> tuple[Function, Types]:
    """The results of several calls at once."""
    more = [jax.ShapeDtypeStruct((2, *each.shape), each.dtype) for each in types]
    return jax.vmap(function), more


def pure(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """An operation whose results depend on its operands only."""
    return for_each_result(eqn, frame.computed(eqn, operands))


def outside(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """An operation whose results vary for any operands."""
    return _varying(frame, eqn, operands, _hidden_collectives(frame, eqn, operands))


def other(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """An unknown operation, judged by its lowering."""
    if frame.analysis.mentions_replicas(eqn):
        return _varying(frame, eqn, operands, [Collective(frame.site(eqn))])
    lowered = frame.analysis.lowered(eqn)
    if lowered.is_pure:
        return pure(frame, eqn, operands)
    collectives = _hidden_collectives(frame, eqn, operands)
    if not collectives and lowered.communicates:
        collectives = [Collective(frame.site(eqn))]
    decider = join(operands)
    if lowered.decides and decider is not None and decider.varies:
        # Branches or loops inside may skip them.
        at = frame.computed(eqn, (decider,))
        site = frame.site(eqn)
        collectives = [found.decided(at, site) for found in collectives]
    return _varying(frame, eqn, operands, collectives)


def _varying(
    frame: Frame, eqn: Equation, operands: list[State], collectives: list[Collective]
) -> list[State]:
    frame.collectives += collectives
    state = frame.varying_since(eqn)
    for cell in operands:
        if isinstance(cell, RefState):  # it may write there
            frame.write(cell, state)
    return for_each_result(eqn, state)


def _hidden_collectives(
    frame: Frame, eqn: Equation, operands: list[State]
) -> list[Collective]:
    """The collectives in inner jaxprs of `eqn`, however it calls them."""
    state = join(operands)
    found: list[Collective] = []
    for jaxpr in inner_jaxprs(eqn.params):
        inputs = [
            RefState(state) if isinstance(var.aval, AbstractRef) else state
            for var in jaxpr.invars
        ]
        found += frame.call(jaxpr, inputs, eqn)[1]
    return found


def analyse(
    jaxpr: Jaxpr,
    varies: Sequence[bool],
    axes: str | Sequence[str],
    replicas: int,
    unpacking: int = 0,
    mesh: Mesh | None = None,
) -> Findings:
    """Finds which outputs of one replica's jaxpr vary, and its collectives."""
    analysis = Analysis(axes, replicas, Rules(), mesh)
    findings = analysis.of(jaxpr, _inputs(jaxpr, varies), unpacking)
    return findings if replicas > 1 else findings.of_one_replica()


def evaluated(
    jaxpr: Jaxpr, varies: Sequence[bool], replicas: Replicas, unpacking: int = 0
) -> Frame:
    """The types of all values at the top level of `jaxpr`, and its collectives."""
    analysis = Analysis(replicas.axes, replicas.count, Rules(), replicas.mesh)
    return analysis.evaluated(jaxpr, _inputs(jaxpr, varies), unpacking)


def _inputs(jaxpr: Jaxpr, varies: Sequence[bool]) -> list[State]:
    states = [
        Replication(Level.VARYING, index) if differs else SAME
        for index, differs in enumerate(varies)
    ]
    return [
        RefState(state) if isinstance(var.aval, AbstractRef) else state
        for var, state in zip(jaxpr.invars, states, strict=True)
    ]


class Rules(dict[Primitive, Rule]):
    """The rule of each primitive."""

    def __missing__(self, primitive: Primitive) -> Rule:
        rule = self[primitive] = _rule_of(primitive)
        return rule


def _rule_of(primitive: Primitive) -> Rule:
    is_named = primitives.is_named_by_jax(primitive)
    if is_named and (rule := _RULES.get(primitive.name)):
        return rule
    is_pure = is_named and primitive.name in primitives.PURE
    if is_pure or primitive in primitives.DECLARED:
        return pure
    return also(other, forward)


def _comparison(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    state = not_reduced(frame.computed(eqn, operands))
    ids = _analysis.compared_ids(frame, eqn)
    if ids is not None and state is not None and state.varies:
        is_one = len(set(ids)) == 1
        state = SAME if is_one else dataclasses.replace(state, classes=as_classes(ids))
    return for_each_result(eqn, state)


def _select(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    choice, *cases = operands
    if level_of(choice) == Level.VARYING and _analysis.are_identical(
        frame, eqn.invars[1:]
    ):
        # All cases are the same value.
        return for_each_result(eqn, frame.computed(eqn, cases))
    # A value chosen by the result of a reduction is no such result.
    return for_each_result(
        eqn, frame.computed(eqn, [not_reduced(content_of(choice)), *cases])
    )


def _hi_primitive(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function that JAX traces when it lowers the step.

    Such as several functions of `jax.numpy` since JAX 0.12.
    """
    jaxpr = frame.analysis.expanded(eqn)
    if jaxpr is None or any(isinstance(state, RefState) for state in operands):
        return outside(frame, eqn, operands)
    return frame.called(jaxpr, operands, eqn, eqn.invars)


def _empty(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """Uninitialized memory."""
    (result,) = eqn.outvars
    # Without elements nothing can differ.
    return [frame.varying_since(eqn) if 0 not in result.aval.shape else None]


# References.


def _empty_ref(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    return [RefState(frame.varying_since(eqn))]


def _new_ref(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    return [RefState(join(operands))]


def _get(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    # Its content, unless an index varies.
    return for_each_result(eqn, frame.computed(eqn, operands))


def _swap(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    cell, written = operands[0], operands[1:]
    before = frame.computed(eqn, operands)
    # Without computed indices, a result of the same shape is all of the content.
    (replaced,), (reference, *others) = eqn.outvars, eqn.invars
    if len(others) == 1 and replaced.aval.shape == reference.aval.shape:
        frame.overwrite(cell, frame.computed(eqn, written))
    else:
        frame.write(cell, frame.computed(eqn, written))
    return for_each_result(eqn, before)


def _addupdate(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    frame.write(operands[0], frame.computed(eqn, operands[1:]))
    return []


# Rules of collectives by effect; the others are judged by their lowering.
_OF_EFFECTS: dict[Effect, Rule] = {
    Effect.SUM: reducing,
    Effect.EXTREME: reducing,
    Effect.GATHER: gathering,
    Effect.BROADCAST: gathering,
    Effect.PERMUTE: permuting,
    Effect.SCATTER: scattering,
    Effect.SUM_SCATTER: scattering,
}
_FOLDING = ("reduce_sum", "reduce_max", "reduce_min")
# Callbacks run on a host whose state we cannot see, once per device.
_OUTSIDE = ("pure_callback", "io_callback", "buffer_callback", "ffi_call")
_OUTSIDE += ("rng_uniform",)
# A kernel may leave parts of its results uninitialized.
_OUTSIDE += ("pallas_call", "mpmd_map", "core_map", "tpu_custom_call")
_CALLS = ("jit", "call", "closed_call", "eval_jaxpr", "remat2")
_CALLS += ("composite",)
_CALLS += ("custom_partitioning", "compute_on", "xla_metadata_call")
_CALLS += ("linear_call", "remat_opt")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
_COMPARISONS += ("eq_to", "le_to", "lt_to")

_RULES: dict[str, Rule] = {
    **{name: rule for e, rule in _OF_EFFECTS.items() for name in primitives_with(e)},
    **dict.fromkeys(_FOLDING, folding),
    "axis_index": axis_index,
    "shard_map": _analysis.mapped,
    "cond": _analysis.branching,
    "while": _analysis.while_loop,
    "scan": _analysis.scan,
    "custom_linear_solve": also(_analysis.linear_solve, forward),
    "custom_jvp_call": also(_analysis.call, forward),
    "custom_vjp_call": also(_analysis.call, backward),
    "custom_vmap_call": also(_analysis.call, batched),
    "call_hi_primitive": _hi_primitive,
    "new_ref": _new_ref,
    "empty_ref": _empty_ref,
    "get": _get,
    "freeze": _get,
    "free_ref": _get,
    "swap": _swap,
    "addupdate": _addupdate,
    "select_n": _select,
    "concatenate": joining,
    "reshape": reshaping,
    "mul": scaling,
    "div": scaling,
    **dict.fromkeys(("empty", "empty2"), _empty),
    "run_state": _analysis.run_state,
    "accum_grad_in_ref": _addupdate,
    **dict.fromkeys(("optimization_barrier", "device_put", "pvary"), per_operand),
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(_OUTSIDE, outside),
    **dict.fromkeys(_CALLS, _analysis.call),
}
