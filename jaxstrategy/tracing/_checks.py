"""What is wrong with a step, found while it is traced.

Each check names the user's lines; none runs anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxstrategy._errors import (
    DivergentCollectiveError,
    DoubleReductionWarning,
    NotMirroredError,
    NotMirroredVariableError,
    NotMirroredWarning,
)
from jaxstrategy._options import is_function
from jaxstrategy.text import _user_code
from jaxstrategy.text._lists import listed
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._successors import successors
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.replication._levels import (
    Collective,
    State,
)
from jaxstrategy.tracing.replication._site import Site


def check(step: TracedStep, expect_mirrored: Any, told: set[type[Warning]]) -> None:
    """Raise if `step` would hang or breaks a promise; warn of what is likely wrong.

    That is a sum of what is reduced already, and state that was mirrored before.

    Args:
      step: what was traced.
      expect_mirrored: see `RunOptions`.
      told: which warnings that are given once were given before; added to.

    Raises:
      NotMirroredVariableError: a mirrored variable is given a varying value.
      DivergentCollectiveError: a varying value decides whether a collective is reached.
      NotMirroredError: a result that should be mirrored is not.
      ValueError: `expect_mirrored` does not fit the results.
    """
    for error in (*divergences(step), *drifting_variables(step)):
        raise error
    if broken := list(broken_promises(step, expect_mirrored)):
        error, *others = broken
        if others:
            paths = [other.path or "" for other in others]
            error.add_note(f"The same holds for {listed(paths, 3, '`')}.")
        raise error
    for message, line in double_reductions(step):
        _user_code.warn(message, DoubleReductionWarning, line)
    if NotMirroredWarning not in told:
        for message, line in forgotten_reductions(step, expect_mirrored):
            told.add(NotMirroredWarning)
            _user_code.warn(message, NotMirroredWarning, line)


# Collectives that only some replicas reach.


def divergences(step: TracedStep) -> Iterator[DivergentCollectiveError]:
    """One for each collective that only some replicas may reach."""
    for found in step.findings.collectives:
        if found.decided_by is None:
            continue
        assert found.decided_at is not None
        what, control = f"the `{_name(found)}`", _control(found.decided_at)
        line = found.site.merge_line if found.is_merge else found.site.line
        decided = step.began(found.decided_by)
        yield DivergentCollectiveError(
            f"{control.effect.format(step=step.name, what=what)}: it is inside a "
            f"`{control.name}` whose {control.decider} may differ between replicas.\n"
            f"  {what}: {_or_unknown(line)}\n"
            f"  the `{control.name}`: {_or_unknown(found.decided_at.line)}\n"
            f"  its {control.decider} varies since: {step.why(found.decided_by)}\n"
            f"{control.advice.format(what=what)}",
            collective_line=line and str(line),
            predicate_line=decided and str(decided),
        )


def _name(found: Collective) -> str:
    """What the user calls it, as far as that is known."""
    if found.is_merge:
        return "merge_call"
    if found.decided_at is not None and found.decided_at.eqns[0] is found.site.eqns[0]:
        return f"collective in {found.site.primitive}"
    return found.site.called(*_COLLECTIVES) or found.site.primitive


_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce", "gather")
_COLLECTIVES += ("psum", "pmean", "pmin", "pmax", "ppermute", "pshuffle", "pswapaxes")
_COLLECTIVES += ("psum_scatter", "pbroadcast", "ragged_all_to_all")


@dataclasses.dataclass(frozen=True)
class _Control:
    """How messages speak of a branch or loop.

    Attributes:
      name: of the function that the user calls.
      decider: what decides there.
      effect: of a `decider` that varies.
      advice: what to do then.
    """

    name: str
    decider: str
    effect: str
    advice: str


def _control(site: Site) -> _Control:
    if site.primitive not in ("while", "cond"):
        return dataclasses.replace(_OPERATION, name=site.primitive)
    if site.primitive == "while":
        return _CONTROLS[site.called("fori_loop", "while_loop") or "while_loop"]
    guess = "switch" if len(site.eqns[0].params["branches"]) > 2 else "cond"
    return _CONTROLS[site.called("switch", "cond") or guess]


_AT_ALL = (
    "Only some replicas of `{step}` would reach {what}, and wait for ever for the "
    "others"
)
_AS_OFTEN = (
    "Some replicas of `{step}` would reach {what} more often than others, and then "
    "wait for ever for them"
)
_OPERATION = _Control(
    "",
    "input",
    _AT_ALL,
    "JAX lowers this operation to branches or loops with collectives, and what decides "
    "there is not known. Reduce its input, so that all replicas do the same: "
    "`get_replica_context().all_reduce('mean', x)`. Or move {what} out of it.",
)
_CONTROLS = {
    control.name: control
    for control in (
        _Control(
            "cond",
            "predicate",
            _AT_ALL,
            "Reduce the predicate, so that all replicas decide alike: "
            "`get_replica_context().all_reduce('max', predicate)` is true if it is on "
            "any replica, 'min' if it is on all. Or move {what} out of the `cond`, and "
            "choose with `jnp.where`.",
        ),
        _Control(
            "switch",
            "index",
            _AT_ALL,
            "Reduce the index, so that all replicas choose the same branch: "
            "`get_replica_context().all_reduce('max', index)`. Or move {what} out of "
            "the `switch`, and choose with `jnp.where`.",
        ),
        _Control(
            "while_loop",
            "condition",
            _AS_OFTEN,
            "Reduce the condition, so that all replicas stop together: a condition of "
            "`get_replica_context().all_reduce('max', condition)` goes on until the "
            "last one is done, 'min' until the first. Or move {what} out of the loop.",
        ),
        _Control(
            "fori_loop",
            "number of turns",
            _AS_OFTEN,
            "Reduce the bounds, so that all replicas take as many turns: "
            "`get_replica_context().all_reduce('max', bound)`. Or move {what} out of "
            "the loop.",
        ),
    )
}


def _or_unknown(line: Line | None) -> str:
    return "a line that JAX did not keep" if line is None else str(line)


# Mirrored variables whose copies would differ.


def drifting_variables(step: TracedStep) -> Iterator[NotMirroredVariableError]:
    """One for each mirrored variable that is given something that varies."""
    for name, must_agree, state in step.variables:
        if must_agree and state is not None and state.varies:
            line = step.began(state)
            yield NotMirroredVariableError(
                f"Variable {name!r} is mirrored, but `{step.name}` assigns it a value "
                "that may differ between replicas: its copies would drift apart.\n"
                f"  the value varies since: {step.why(state)}\n"
                "Reduce it first, or make the variable with an `aggregation` "
                "('sum', 'mean', 'only_first_replica'), or with "
                "`synchronization='on_read'` if each replica is to have its own.",
                path=name,
                line=line and str(line),
            )


# Sums of what is summed already.


def double_reductions(step: TracedStep) -> Iterator[tuple[str, Line | None]]:
    """For each sum of the result of a reduction, a message and the line of the sum."""
    seen = set()
    for found in step.findings.collectives:
        before = found.reduced_before
        if before is None or _is_no_second_sum(found.site, before):
            continue
        first, again = step.began(before), found.site.line
        if (first, again) in seen:
            continue
        seen.add((first, again))
        message = (
            f"`{step.name}` sums over the replicas what is the result of a reduction "
            "already, equal on all of them: the sum is that times their number.\n"
            f"  reduced first: {_or_unknown(first)}\n"
            f"  summed again: {_or_unknown(again)}\n"
            "Leave out one of them. If every replica is meant to count, reduce with "
            "'mean', or divide by `num_replicas_in_sync` before the sum."
        )
        yield message, again


def _is_no_second_sum(site: Site, before: State) -> bool:
    """Whether the sum at `site` of the reduction `before` is right for all we know.

    Differentiation makes sums of its own: the gradient of a sum is a sum. What they
    make of a loss is for its scale to decide, and that is where the user put it.
    """
    if site.is_transposed or (before.site is not None and before.site.is_transposed):
        return True
    # A mean; and the derivative of our 'min' and 'max', a weighted mean.
    return site.called("pmean", "_extreme_jvp") is not None


# Results that are not what the caller expects.


def broken_promises(step: TracedStep, expected: Any) -> Iterator[NotMirroredError]:
    """One for each result that is expected to be mirrored and varies."""
    if expected is None:
        return
    for _, keys, state, is_expected in _varying(step, expected):
        if not is_expected:
            continue
        line, path = step.began(state), step.path(keys)
        what, advice = (
            (f"`{step.name}` leaves {path} different on each replica.", _OF_OBJECTS)
            if step.is_of_object(keys)
            else (_EXPECTED.format(path=path), _OF_RESULTS)
        )
        text = f"{what}\n  it varies since: {step.why(state)}\n{advice}"
        yield NotMirroredError(text, path=path.strip("`"), line=line and str(line))


_EXPECTED = "{path} was expected to be mirrored, but may differ between replicas."
_OF_RESULTS = (
    "Something it is computed from was not reduced: use "
    "`get_replica_context().all_reduce('mean', ...)` on the way, usually on the "
    "gradients. If it may differ, take it out of `expect_mirrored`."
)
_OF_OBJECTS = (
    "Reduce what it is computed from: the gradients with "
    "`get_replica_context().all_reduce('mean', grads)`, statistics of BatchNorm with "
    "`jaxstrategy.flax.nnx.BatchNorm`, and give metrics what "
    "`get_replica_context().all_gather(values, 0)` returns."
)


# State that was mirrored and is not any more.


@dataclasses.dataclass(frozen=True)
class Unstated:
    """A result that varies, and of which nobody has said whether it should.

    Attributes:
      path: how messages call it.
      why: where it began to vary.
    """

    path: str
    why: str


def unstated(step: TracedStep, expected: Any) -> dict[int, Unstated]:
    """Those of `step`, by their place among the leaves of the results."""
    return {
        position: Unstated(step.path(keys), step.why(state))
        for position, (keys, state) in _unstated(step, expected).items()
    }


def _unstated(step: TracedStep, expected: Any) -> dict[int, tuple[Any, State]]:
    if step.num_replicas == 1:  # one replica cannot differ from itself
        return {}
    return {
        position: (keys, state)
        for position, keys, state, is_expected in _varying(step, expected)
        if is_expected is None
    }


def forgotten_reductions(
    step: TracedStep, expected: Any
) -> Iterator[tuple[str, Line | None]]:
    """A message and a line if state comes out different that went in mirrored."""
    varying = _unstated(step, expected)
    replaced = successors(step) if varying else {}
    found = [(replaced[each], *varying[each]) for each in varying if each in replaced]
    if not found:
        return
    (argument, keys, state), *others = found
    paths = [step.path(other).strip("`") for _, other, _ in others]
    also = listed(paths, 3, "`")
    message = (
        f"`{step.name}` was given {step.label(argument)} equal on all replicas, and "
        f"returns {step.path(keys)}, what takes its place, different on each.\n"
        f"  it varies since: {step.why(state)}\n"
        + (f"  so do {also}\n" if others else "")
        + "A loop that goes on with it has a model for each replica instead of one. "
        + SHOULD_BE_REDUCED
    )
    yield message, step.began(state)


SHOULD_BE_REDUCED = (
    "Something it is computed from was not reduced: use "
    "`get_replica_context().all_reduce('mean', ...)` on the way, usually on the "
    "gradients (for BatchNorm: `jaxstrategy.flax.linen.BatchNorm`). If each replica is "
    "to have its own, say so: `RunOptions(expect_mirrored=False)`."
)


def _varying(
    step: TracedStep, expected: Any
) -> Iterator[tuple[int, Any, State, bool | None]]:
    """The results that vary: position, path, why, and whether they should not."""
    is_expected = _expectation(step, expected)
    arrays = step.results.array_paths()
    states = zip(arrays, step.outputs, step.findings.outputs, strict=True)
    for (position, keys), output, state in states:
        if state is not None and state.varies:
            yield position, keys, state, is_expected(position, keys, output)


def _expectation(
    step: TracedStep, expected: Any
) -> Callable[[int, Any, Any], bool | None]:
    """Whether the result with this position, path and type should be mirrored.

    None: nothing was said of it.
    """
    if expected is None:
        return lambda position, keys, output: None
    if is_function(expected):
        return lambda position, keys, output: bool(
            expected(keys, jax.ShapeDtypeStruct(output.shape, output.dtype))
        )
    wanted = _spread(expected, step)
    return lambda position, keys, output: wanted[position]


def _spread(prefix: Any, step: TracedStep) -> list[bool | None]:
    """For each leaf of the results the entry of `prefix`, a pytree prefix, above it."""
    results = step.results
    shape = results.treedef.unflatten(range(len(results.leaves)))
    # None has no leaves, but may have an entry of its own; -1 stands for it.
    shape = jax.tree.map(lambda n: -1 if n is None else n, shape, is_leaf=_is_none)
    try:
        spread = jax.tree.broadcast(prefix, shape, is_leaf=_is_none)
    except ValueError as error:
        treedef = results.treedef
        if step.has_objects:  # nobody has written what stands for them
            prefix, treedef = prefix[0], treedef.children()[0]
        structure = str(treedef).removeprefix("PyTreeDef(").removesuffix(")")
        raise ValueError(
            f"`expect_mirrored` is {prefix!r}, which does not fit what the step "
            f"returns: {step.path(())} is {structure}. Give True or False for all of "
            "it, or for each part, in containers like its own."
        ) from error
    entries = jax.tree.leaves(spread, is_leaf=_is_none)
    pairs = zip(jax.tree.leaves(shape), entries, strict=True)
    return [entry for position, entry in pairs if position >= 0]


def _is_none(entry: Any) -> bool:
    return entry is None
