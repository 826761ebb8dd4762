"""The rule of each primitive, and `analyse`: which values are equal on all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import Jaxpr, Primitive
from jax.ref import AbstractRef
from jax.sharding import Mesh

from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    Effect,
    Equation,
    effect_of,
    inner_jaxprs,
    named,
    plain,
)
from jaxstrategy._src.tracing.replication import (
    analysis as _analysis,
    control,
    primitives,
)
from jaxstrategy._src.tracing.replication.analysis import (
    Analysis,
    Frame,
    Rule,
    gathered,
    gathers_sums,
    is_mean,
    is_share,
)
from jaxstrategy._src.tracing.replication.primitives import alone, operands_of
from jaxstrategy._src.tracing.replication.types import (
    SAME,
    Collective,
    Findings,
    HeldState,
    Known,
    Level,
    Replication,
    Site,
    computed,
    content_of,
    decided,
    for_all,
    join,
    level_of,
    not_reduced,
    numbered,
    varying_since,
)
from jaxstrategy._src.values.arrays import Function


def each(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """Several operations at once, each of one operand."""
    if len(operands) != len(eqn.outvars):
        return for_all(eqn, computed(eqn, operands))
    return [computed(eqn, (operand,)) for operand in operands]


def axis_index(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The replica's id varies; an index along another axis does not."""
    varies = frame.analysis.mentions_replicas(eqn)
    return for_all(eqn, varying_since(eqn) if varies else None)


def summing(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A sum over the replicas."""
    return _collective(frame, eqn, operands, _summed_before(frame, eqn, operands))


def reducing(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The smallest or largest over the replicas: again, it changes nothing."""
    return _collective(frame, eqn, operands, None)


def _summed_before(
    frame: Frame, eqn: Equation, operands: list[Known]
) -> Replication | None:
    """The operand that `eqn` sums although it is reduced, if it is not for a mean."""
    state = join(operands)
    if state is not None and state.varies:
        state = state.part
    if level_of(state) != Level.REDUCED or is_mean(frame, eqn):
        return None
    return state


def _collective(
    frame: Frame, eqn: Equation, operands: list[Known], before: Replication | None
) -> list[Known]:
    """A reduction: its result is the same on all members of its group."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    frame.collectives.append(_noted(eqn, before))
    if eqn.params.get("axis_index_groups") is not None:
        pairs = zip(eqn.invars, operands, strict=True)
        return [
            _grouped(
                frame, eqn, content_of(operand), Level.REDUCED, _is_exact(frame, atom)
            )
            for atom, operand in pairs
        ]
    reduced = Replication(Level.REDUCED, None, Site((eqn,)), is_direct=True)
    return [None if operand is None else reduced for operand in operands]


def _noted(eqn: Equation, before: Replication | None = None) -> Collective:
    groups = eqn.params.get("axis_index_groups")
    waiting = None if groups is None else tuple(map(tuple, groups))
    return Collective(Site((eqn,)), reduced_before=before, groups=waiting)


def gathering(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A collective after which all members of a group have the same."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    frame.collectives.append(_noted(eqn))
    of_sums = gathers_sums(frame, eqn)
    whole = Replication(Level.REDUCED, None, Site((eqn,)), is_direct=True)
    if eqn.params.get("axis_index_groups") is not None:
        state = _grouped(frame, eqn, join(operands), Level.SAME)
        return [whole if of_sums and state is SAME else state]
    return for_all(eqn, whole if of_sums else SAME)


def folding(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A sum or an extreme along axes of an array, which may be those of replicas."""
    state = computed(eqn, operands)
    if state is SAME and (origin := gathered(frame, eqn)) is not None:
        if frame.analysis.mentions_replicas(origin):
            return [Replication(Level.REDUCED, None, Site((eqn,)), is_direct=True)]
    return [state]


def permuting(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A value sent on: each replica has that of another, or zeros if none sends."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    sender = {target: source for source, target in eqn.params["perm"]}
    replicas = range(frame.analysis.replicas)
    if any(replica not in sender for replica in replicas):
        return scattering(frame, eqn, operands)
    frame.collectives.append(_noted(eqn))
    return [
        _sent(eqn, content_of(operand), [sender[r] for r in replicas])
        for operand in operands
    ]


def _sent(
    eqn: Equation, operand: Replication | None, senders: list[int]
) -> Replication | None:
    """The knowledge of `operand` when each replica has that of its sender."""
    state = computed(eqn, (operand,))
    if state is None or not state.varies:
        return state
    classes = operand.classes if operand is not None else None
    if classes is None:
        return varying_since(eqn)
    sent = numbered([classes[sender] for sender in senders])
    return dataclasses.replace(varying_since(eqn), classes=sent)


def _is_exact(frame: Frame, atom: Atom) -> bool:
    """Whether a sum of such numbers is the same in whatever order they are added.

    XLA adds on CPUs in the order of the replicas. On accelerators the order follows
    the links between the devices of a group; that of two numbers makes no difference.
    """
    return frame.analysis.is_on_cpu or not jnp.issubdtype(atom.aval.dtype, jnp.inexact)


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
        held = operand.classes or tuple(replicas)
    elif is_sum and len(groups) > 1:
        # The same in groups of one size. But who reduces in groups means to differ.
        held = tuple(replicas)
    else:
        held = (0,) * len(replicas)
    results = []
    for replica in replicas:
        group = _group_of(replica, groups)
        is_alike = is_exact or len(group) < 3
        results.append((None if is_alike else group, *(held[each] for each in group)))
    if len(set(results)) == 1:
        return (
            Replication(level, None, Site((eqn,)), is_direct=True) if is_sum else SAME
        )
    return dataclasses.replace(varying_since(eqn), classes=numbered(results))


def _group_of(replica: int, groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    return next(group for group in groups if replica in group)


def joining(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """Arrays joined into one."""
    state = computed(eqn, operands)
    if level_of(state) == Level.VARYING:
        reduced = list(filter(None, map(_reduced_of, operands)))
        if reduced and state is not None:
            state = dataclasses.replace(state, part=reduced[0])
    return [state]


def _reduced_of(operand: Known) -> Replication | None:
    """What of an operand is reduced: all of it, or a part that was joined before."""
    state = content_of(operand)
    if state is None or state.level is Level.REDUCED:
        return state
    return state.part


def reshaping(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The same elements in another shape."""
    state, before = computed(eqn, operands), content_of(operands[0])
    if before is not None and before.part is not None and state is not None:
        state = dataclasses.replace(state, part=before.part)
    return [state]


def scattering(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A collective that gives each member another part."""
    if not frame.analysis.mentions_replicas(eqn):
        return each(frame, eqn, operands)
    before = None
    if effect_of(eqn) is Effect.SUM_SCATTER:
        before = _summed_before(frame, eqn, operands)
    frame.collectives.append(_noted(eqn, before))
    # Also of the same on all: each has the parts at its own place, which differ.
    return for_all(eqn, varying_since(eqn))


def scaling(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A product or quotient."""
    state = computed(eqn, operands)
    if level_of(state) == Level.REDUCED and is_share(frame, eqn):
        # Each replica's equal share, to be summed: it counts as reduced no more. But a
        # sum divided by the number of replicas is a mean.
        if not any(isinstance(s, Replication) and s.is_direct for s in operands):
            return [not_reduced(state)]
    return [state]


# Of a function and the types of its arguments another function and the types of its
# own. It takes the arguments once or several times, and so returns the results.
Types = list[jax.ShapeDtypeStruct]
Transform = Callable[[Function, Types], tuple[Function, Types]]


# A rule often calls the function that it is of, so this must end somewhere: derivatives
# of derivatives are looked at.
_ORDERS = 2


# A function with rules of its own for derivatives, or for `vmap`, is one thing in the
# step and another under `jax.grad` around `run`. The same program serves both, so what
# is called equal on all replicas must be so under the rules, too.
def also(rule: Rule, *transforms: Transform) -> Rule:
    """`rule`, and what becomes of the equation under `transforms`."""

    def both(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
        results = rule(frame, eqn, operands)
        if all(level_of(state) == Level.VARYING for state in results):
            return results
        if frame.analysis.order == _ORDERS:
            return results
        for transform in transforms:
            others = _transformed(frame, eqn, operands, transform)
            pairs = zip(results, others, strict=True)
            results = [
                result if isinstance(result, HeldState) else _worse(result, other)
                for result, other in pairs
            ]
        return results

    return both


def _worse(result: Known, other: Known) -> Known:
    return other if level_of(other) == Level.VARYING else result


def _transformed(
    frame: Frame, eqn: Equation, operands: list[Known], transform: Transform
) -> list[Known]:
    """The knowledge of each result of `eqn` under `transform`."""
    unknown: list[Known] = [varying_since(eqn)] * len(eqn.outvars)
    if any(isinstance(state, HeldState) for state in operands):
        return unknown
    try:
        jaxpr = frame.analysis.transformed(eqn, transform, _jaxpr_of)
    except NotImplementedError:  # nor can the step be transformed
        return [None] * len(eqn.outvars)
    except Exception:  # anybody's code, in a place that it was not written for
        return unknown
    pairs = zip(eqn.invars, operands, strict=True)
    given = [state for atom, state in pairs if not isinstance(atom, core.Literal)]
    copies = len(jaxpr.invars) // len(given) if given else 1
    frame.analysis.order += 1
    # Collectives of a rule are in no program unless it is differentiated.
    outputs, _ = frame.enter(jaxpr, given * copies, eqn)
    frame.analysis.order -= 1
    kept = _is_kept(eqn)
    each = [join(outputs[i :: sum(kept)]) for i in range(sum(kept))]
    found = iter(each)
    return [next(found) if is_kept else None for is_kept in kept]


def _is_kept(eqn: Equation) -> list[bool]:
    return [not isinstance(var, core.DropVar) for var in eqn.outvars]


def _jaxpr_of(
    eqn: Equation, transform: Transform, axis_env: list[tuple[str, int]]
) -> Any:
    only = core.jaxpr_as_fun(alone(eqn))
    types = [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
        for atom in operands_of(eqn)
    ]
    made, given = transform(only, types)
    return plain(jax.make_jaxpr(made, axis_env=axis_env)(*given))


def forward(function: Function, types: Types) -> tuple[Function, Types]:
    """The results and their tangents."""

    def pushed(*given: Any) -> Any:
        primals, tangents = given[: len(types)], given[len(types) :]
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
    """The results, as they are when a gradient is to follow.

    The gradient itself needs no proof: JAX sums that of a mirrored argument over the
    replicas.
    """
    return lambda *given: jax.vjp(function, *given)[0], types


def batched(function: Function, types: Types) -> tuple[Function, Types]:
    """The results of several calls at once."""
    more = [jax.ShapeDtypeStruct((2, *each.shape), each.dtype) for each in types]
    return jax.vmap(function), more


def pure(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """An operation that computes from its operands and does nothing else."""
    return for_all(eqn, computed(eqn, operands))


def outside(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """An operation whose results differ between replicas whatever it is given."""
    return _varying(frame, eqn, operands, _hidden_collectives(frame, eqn, operands))


def other(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """An operation that JAX lowers to something; what that is decides."""
    if frame.analysis.mentions_replicas(eqn):
        return _varying(frame, eqn, operands, [Collective(Site((eqn,)))])
    lowered = frame.analysis.lowered(eqn)
    if lowered.is_pure:
        return pure(frame, eqn, operands)
    collectives = _hidden_collectives(frame, eqn, operands)
    if not collectives and lowered.communicates:
        collectives = [Collective(Site((eqn,)))]
    if lowered.decides:
        collectives = _decided_inside(collectives, eqn, operands)
    return _varying(frame, eqn, operands, collectives)


def _varying(
    frame: Frame, eqn: Equation, operands: list[Known], collectives: list[Collective]
) -> list[Known]:
    frame.collectives += collectives
    state = varying_since(eqn)
    for cell in operands:
        if isinstance(cell, HeldState):  # it may write there
            frame.write(cell, state)
    return for_all(eqn, state)


def _hidden_collectives(
    frame: Frame, eqn: Equation, operands: list[Known]
) -> list[Collective]:
    """The collectives in the jaxprs of `eqn`, however it calls them."""
    given = join(operands)
    found: list[Collective] = []
    for jaxpr in inner_jaxprs(eqn.params):
        inputs = [
            HeldState(given) if isinstance(var.aval, AbstractRef) else given
            for var in jaxpr.invars
        ]
        found += frame.enter(jaxpr, inputs, eqn)[1]
    return found


def _decided_inside(
    collectives: list[Collective], eqn: Equation, operands: list[Known]
) -> list[Collective]:
    """The `collectives`, which something inside `eqn` may leave out."""
    decider = join(operands)
    if decider is None or not decider.varies:
        return collectives
    return [decided(found, computed(eqn, (decider,)), eqn) for found in collectives]


def analyse(
    jaxpr: Jaxpr,
    varies: Sequence[bool],
    axes: str | Sequence[str],
    replicas: int,
    unpacking: int = 0,
    mesh: Mesh | None = None,
) -> Findings:
    """The findings about each output of `jaxpr`, and its collectives."""
    analysis = Analysis(axes, replicas, Rules(), mesh)
    findings = analysis.of(jaxpr, _inputs(jaxpr, varies), unpacking)
    return findings if replicas > 1 else findings.of_one_replica()


def varying(
    jaxpr: Jaxpr, varies: Sequence[bool], replicas: Replicas, unpacking: int = 0
) -> Callable[[Atom], bool]:
    """Whether a value of `jaxpr`, at its top level, may differ between replicas."""
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
    is_named = primitives.is_named_by_jax(primitive)
    if is_named and (rule := _RULES.get(primitive.name)):
        return rule
    if (
        primitives.is_declared(primitive)
        or is_named
        and primitive.name in primitives.PURE
    ):
        return pure
    return also(other, forward)


def _comparison(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    state = not_reduced(computed(eqn, operands))
    ids = _analysis.compared_ids(frame, eqn)
    if ids is not None and state is not None and state.varies:
        is_one = len(set(ids)) == 1
        state = SAME if is_one else dataclasses.replace(state, classes=numbered(ids))
    return for_all(eqn, state)


def _select(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    choice, *cases = operands
    if level_of(choice) == Level.VARYING and _analysis.are_one(frame, eqn.invars[1:]):
        # Whichever case a replica chooses, it is the same value.
        return for_all(eqn, computed(eqn, cases))
    # What is chosen by the result of a reduction is not itself such a result.
    return for_all(eqn, computed(eqn, [not_reduced(content_of(choice)), *cases]))


def _hi_primitive(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    found = control.hi_primitive(frame, eqn, operands)
    return outside(frame, eqn, operands) if found is None else found


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
    Effect.SUM: summing,
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
    **dict.fromkeys(_FOLDING, folding),
    "axis_index": axis_index,
    "shard_map": control.mapped,
    "cond": control.branching,
    "while": control.while_loop,
    "scan": control.scan,
    "custom_linear_solve": also(control.linear_solve, forward),
    "custom_jvp_call": also(control.call, forward),
    "custom_vjp_call": also(control.call, backward),
    "custom_vmap_call": also(control.call, batched),
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
    "run_state": control.run_state,
    "accum_grad_in_ref": _addupdate,
    **dict.fromkeys(("optimization_barrier", "device_put", "pvary"), each),
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(_OUTSIDE, outside),
    **dict.fromkeys(_CALLS, control.call),
}
