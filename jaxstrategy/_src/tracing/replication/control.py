"""Calls, branches and loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jax.ref import AbstractRef

from jaxstrategy._src.contexts.replica_context import MERGE_SCOPE
from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    ClosedJaxpr,
    Equation,
    hidden,
    plain,
)
from jaxstrategy._src.tracing.replication.analysis import Frame, repeats
from jaxstrategy._src.tracing.replication.primitives import is_declared_call
from jaxstrategy._src.tracing.replication.types import (
    Collective,
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
    varying_since,
)


def call(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A function called once, with the operands as they are."""
    return _called(frame, eqn, operands, repeats(frame, eqn.invars))


def mapped(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A function called once, with parts of the operands; of the same, other ones."""
    return _called(frame, eqn, operands, ())


def _called(
    frame: Frame, eqn: Equation, operands: list[Known], same: tuple[int, ...]
) -> list[Known]:
    (jaxpr,) = (eqn.params[key] for key in _CALLEES if key in eqn.params)
    outputs, collectives = frame.enter(jaxpr, operands, eqn, repeats=same)
    frame.collectives += collectives
    if is_declared_call(eqn):
        return for_all(eqn, computed(eqn, operands))
    return outputs


# Where the primitives that call a function once keep it.
_CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee", "fwd_jaxpr")


def run_state(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """A function of references, called once; the results are what those hold then."""
    inner = plain(eqn.params["jaxpr"])
    given: Iterator[Known] = iter(operands)
    cells: list[Known] = []
    for var, is_given in zip(inner.invars, eqn.params["is_initialized"], strict=True):
        # What was not initialised is what lies in the memory of each device.
        state: Known = next(given) if is_given else varying_since(eqn)
        if isinstance(var.aval, AbstractRef) and not isinstance(state, HeldState):
            state = HeldState(state)
        cells.append(state)
    _, collectives = frame.enter(inner, cells, eqn)
    frame.collectives += collectives
    return list(map(content_of, cells))


def linear_solve(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    """The solver, called once; the other functions are for derivatives."""
    sizes = eqn.params["const_lengths"]
    start = sizes.matvec + sizes.vecmat
    constants = operands[start : start + sizes.solve]
    right = operands[sum(sizes) :]
    solver = eqn.params["jaxprs"].solve
    outputs, collectives = frame.enter(solver, constants + right, eqn)
    frame.collectives += collectives
    return outputs


def hi_primitive(
    frame: Frame, eqn: Equation, operands: list[Known]
) -> list[Known] | None:
    """A Python function that JAX traces when it lowers the step; None if it cannot yet.

    Several functions of `jax.numpy` are such primitives since JAX 0.12.
    """
    jaxpr = frame.analysis.expanded(eqn)
    if jaxpr is None or any(isinstance(state, HeldState) for state in operands):
        return None
    same = repeats(frame, eqn.invars)
    outputs, collectives = frame.enter(jaxpr, operands, eqn, repeats=same)
    frame.collectives += collectives
    return outputs


def branching(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    predicate, operands = operands[0], operands[1:]
    entered, ends = [], []
    same = repeats(frame, eqn.invars[1:])
    for branch in eqn.params["branches"]:
        # Each branch starts from what was there before, not from another's writes.
        starts = [
            HeldState(state.content) if isinstance(state, HeldState) else state
            for state in operands
        ]
        entered.append(frame.enter(branch, starts, eqn, repeats=same))
        ends.append(starts)
    decider = _decider(eqn, content_of(predicate))
    for branch, (_, collectives) in zip(eqn.params["branches"], entered, strict=True):
        frame.collectives += _decided(collectives, decider, eqn, branch)
    for cell, *versions in zip(operands, *ends, strict=True):
        if isinstance(cell, HeldState) and any(end.is_written for end in versions):
            _merge(frame, cell, versions)
            if decider is not None:  # replicas may take different branches
                frame.write(cell, decider)
    # Replicas that take one branch together still have what they had before.
    results = zip(*(outputs for outputs, _ in entered), strict=True)
    return [join((decider, *versions)) for versions in results]


def _merge(frame: Frame, cell: HeldState, versions: list[HeldState]) -> None:
    """Note that `cell` holds one of `versions`, which are what branches left of it."""
    if all(version.is_overwritten for version in versions):
        frame.overwrite(cell, join(versions))
        return
    for version in versions:
        frame.write(cell, version.content)


def _decider(eqn: Equation, predicate: Replication | None) -> Replication | None:
    """The predicate of `eqn`, if it varies."""
    if level_of(predicate) != Level.VARYING:
        return None
    return computed(eqn, (predicate,))


def _decided(
    collectives: list[Collective],
    decider: Replication | None,
    eqn: Equation,
    *jaxprs: ClosedJaxpr,
) -> list[Collective]:
    """The `collectives` of the `jaxprs` of `eqn`, where `decider` decides."""
    if decider is None:
        return collectives
    found = [
        each if each.is_whole(decider) else decided(each, decider, eqn)
        for each in collectives
    ]
    if all(each.decided_by is None for each in found):
        if merge := _first_merge(eqn, jaxprs):
            site, at = Site((merge, eqn)), Site((eqn,))
            found.append(Collective(site, decider, at, is_merge=True))
    return found


def _first_merge(eqn: Equation, jaxprs: Iterable[ClosedJaxpr]) -> Equation | None:
    """The first equation of a `merge_call` in `jaxprs`, which `eqn` holds, or None."""
    if _in_merge(eqn):
        return None
    return next(filter(_in_merge, hidden(tuple(jaxprs))), None)


def _in_merge(eqn: Equation) -> bool:
    return MERGE_SCOPE in str(eqn.source_info.name_stack)


def while_loop(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:n_cond]
    body_consts = operands[n_cond : n_cond + n_body]

    def turn(carry: list[Known]) -> tuple[list[Known], list[Collective]]:
        (goes_on,), tests = frame.enter(
            params["cond_jaxpr"], cond_consts + carry, eqn, is_certain=False
        )
        returned, steps = frame.enter(
            params["body_jaxpr"], body_consts + carry, eqn, is_certain=False
        )
        after: list[Known] = returned
        decider = _decider(eqn, content_of(goes_on))
        if decider is not None:  # replicas may stop at different turns
            for cell in cond_consts + body_consts:
                if isinstance(cell, HeldState) and cell.is_written:
                    frame.write(cell, decider)
            after = [join((decider, state)) for state in returned]
        jaxprs = params["cond_jaxpr"], params["body_jaxpr"]
        return after, _decided(tests + steps, decider, eqn, *jaxprs)

    return frame.until_stable(turn, operands[n_cond + n_body :])


def scan(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
    inner = plain(eqn.params["jaxpr"])
    n_consts, n_carry = scan_counts(eqn)
    n_same = n_consts + n_carry
    consts, xs = operands[:n_consts], operands[n_same:]
    results: list[Known] = []

    def turn(carry: list[Known]) -> tuple[list[Known], list[Collective]]:
        results[:], collectives = frame.enter(
            inner, consts + carry + xs, eqn, is_certain=False
        )
        return results[:n_carry], collectives

    carry = frame.until_stable(turn, operands[n_consts:n_same])
    # Without a turn the carry comes out as it went in, and not as the body returns it.
    if eqn.params["length"] == 0:
        results[:n_carry] = carry
    # What comes out is what the last turn made, whatever the first one was given.
    return results


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """The numbers of operands of a scan that are constants, and that are its carry."""
    inner = plain(eqn.params["jaxpr"])
    # The operands are constants, carry and xs; the results are carry and ys. Their
    # numbers are named differently from version to version, but only xs and ys have
    # one dimension more outside the loop than inside it.
    n_carry = _count_equal_rank(eqn.outvars, inner.outvars)
    return _count_equal_rank(eqn.invars, inner.invars) - n_carry, n_carry


def _count_equal_rank(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)
