"""Rules for calls, branches and loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jax.ref import AbstractRef

from jaxstrategy._src.contexts.replica_context import MERGE_SCOPE
from jaxstrategy._src.tracing.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    inner_eqns,
    plain,
)
from jaxstrategy._src.tracing.replication.analysis import Frame, with_own_references
from jaxstrategy._src.tracing.replication.primitives import is_declared_call
from jaxstrategy._src.tracing.replication.types import (
    Collective,
    Level,
    RefState,
    Replication,
    Site,
    State,
    content_of,
    for_each_result,
    join,
    level_of,
)


def call(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function called once with the operands."""
    return _called(frame, eqn, operands, eqn.invars)


def mapped(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function called once with other parts of each operand."""
    return _called(frame, eqn, operands, ())


def _called(
    frame: Frame, eqn: Equation, operands: list[State], names: Sequence[Atom]
) -> list[State]:
    (jaxpr,) = (eqn.params[key] for key in _CALLEES if key in eqn.params)
    outputs = frame.called(jaxpr, operands, eqn, names)
    if is_declared_call(eqn):
        return for_each_result(eqn, frame.computed(eqn, operands))
    return outputs


# The parameters in which primitives that call a function once have it.
_CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee", "fwd_jaxpr")


def run_state(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function of references, called once; results are the references' contents."""
    inner = plain(eqn.params["jaxpr"])
    following: Iterator[State] = iter(operands)
    cells: list[State] = []
    is_initialized = eqn.params["is_initialized"]
    for var, has_value in zip(inner.invars, is_initialized, strict=True):
        state: State = next(following) if has_value else frame.varying_since(eqn)
        if isinstance(var.aval, AbstractRef) and not isinstance(state, RefState):
            state = RefState(state)
        cells.append(state)
    frame.called(inner, cells, eqn)
    return list(map(content_of, cells))


def linear_solve(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """The solver is called once; the other functions are for derivatives."""
    sizes = eqn.params["const_lengths"]
    start = sizes.matvec + sizes.vecmat
    constants = operands[start : start + sizes.solve]
    right = operands[sum(sizes) :]
    return frame.called(eqn.params["jaxprs"].solve, constants + right, eqn)


def branching(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    predicate, operands = operands[0], operands[1:]
    results, ends = [], []
    decider = _decider(frame, eqn, content_of(predicate))
    for branch in eqn.params["branches"]:
        # Each branch starts from the same contents, without the writes of others.
        starts = with_own_references(operands)
        outputs, collectives = frame.call(branch, starts, eqn, eqn.invars[1:])
        frame.collectives += _decided(frame, collectives, decider, eqn, branch)
        results.append(outputs)
        ends.append(starts)
    for cell, *versions in zip(operands, *ends, strict=True):
        if isinstance(cell, RefState) and any(end.is_written for end in versions):
            _merge(frame, cell, versions)
            if decider is not None:  # replicas may take different branches
                frame.write(cell, decider)
    # Replicas that take the same branch still agree.
    return [join((decider, *versions)) for versions in zip(*results, strict=True)]


def _merge(frame: Frame, cell: RefState, versions: list[RefState]) -> None:
    """Lets a reference hold what one of several branches left in it."""
    if all(version.is_overwritten for version in versions):
        frame.overwrite(cell, join(versions))
        return
    for version in versions:
        frame.write(cell, version.content)


def _decider(
    frame: Frame, eqn: Equation, predicate: Replication | None
) -> Replication | None:
    """The predicate of `eqn`, if it varies."""
    if level_of(predicate) != Level.VARYING:
        return None
    return frame.computed(eqn, (predicate,))


def _decided(
    frame: Frame,
    collectives: list[Collective],
    decider: Replication | None,
    eqn: Equation,
    *jaxprs: ClosedJaxpr,
) -> list[Collective]:
    """Marks the collectives in branches or loops of `eqn` with its varying decider."""
    if decider is None:
        return collectives
    at = frame.site(eqn)
    marked = [
        each if each.agrees_on(decider) else each.decided(decider, at)
        for each in collectives
    ]
    if all(each.decided_by is None for each in marked):
        if merge := _first_merge(eqn, jaxprs):
            site = Site((merge, *at.eqns))
            marked.append(Collective(site, decider, at, is_merge=True))
    return marked


def _first_merge(eqn: Equation, jaxprs: Iterable[ClosedJaxpr]) -> Equation | None:
    """The first equation of a `merge_call` inside `eqn`, or None."""
    if _in_merge(eqn):
        return None
    return next(filter(_in_merge, inner_eqns(tuple(jaxprs))), None)


def _in_merge(eqn: Equation) -> bool:
    return MERGE_SCOPE in str(eqn.source_info.name_stack)


def while_loop(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:n_cond]
    body_consts = operands[n_cond : n_cond + n_body]

    def turn(carry: list[State]) -> tuple[list[State], list[Collective]]:
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        after: list[State]
        (goes_on,), tests = frame.repeated(condition, cond_consts + carry, eqn)
        after, steps = frame.repeated(body, body_consts + carry, eqn)
        decider = _decider(frame, eqn, content_of(goes_on))
        if decider is not None:  # replicas may stop at different iterations
            for cell in cond_consts + body_consts:
                if isinstance(cell, RefState) and cell.is_written:
                    frame.write(cell, decider)
            after = [join((decider, state)) for state in after]
        collectives = tests + steps
        return after, _decided(frame, collectives, decider, eqn, condition, body)

    return frame.fixed_point(turn, operands[n_cond + n_body :])


def scan(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    inner = plain(eqn.params["jaxpr"])
    n_consts, n_carry = scan_counts(eqn)
    n_same = n_consts + n_carry
    consts, xs = operands[:n_consts], operands[n_same:]
    results: list[State] = []

    def turn(carry: list[State]) -> tuple[list[State], list[Collective]]:
        results[:], collectives = frame.repeated(inner, consts + carry + xs, eqn)
        return results[:n_carry], collectives

    carry = frame.fixed_point(turn, operands[n_consts:n_same])
    # Without iterations the carry is returned unchanged.
    if eqn.params["length"] == 0:
        results[:n_carry] = carry
    return results


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """The numbers of operands of a scan that are constants, and that are its carry."""
    inner = plain(eqn.params["jaxpr"])
    # Operands are constants, carry and xs; results are carry and ys. The parameters
    # with their numbers change between versions; but only xs and ys have one dimension
    # more outside the loop.
    n_carry = _count_equal_rank(eqn.outvars, inner.outvars)
    return _count_equal_rank(eqn.invars, inner.invars) - n_carry, n_carry


def _count_equal_rank(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)
