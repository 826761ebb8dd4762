"""Results that may differ between replicas, and are not expected to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import jax

from jaxstrategy._errors import NotMirroredError
from jaxstrategy._options import is_function
from jaxstrategy.text._lists import listed
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._jaxpr_types import ArrayType, KeyPath
from jaxstrategy.tracing._results import Results
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._successors import successors
from jaxstrategy.tracing.replication._levels import Replication
from jaxstrategy.values._types import PyTree


class NamedResults(Protocol):
    """The results of a step, of which messages say the names."""

    @property
    def results(self) -> Results:
        """The pytree that it returned."""
        ...

    @property
    def has_objects(self) -> bool:
        """Whether new arrays of objects stand behind them."""
        ...

    def path(self, keys: KeyPath) -> str:
        """The name of the result at `keys`."""
        ...


def broken_promises(step: TracedStep, expected: PyTree) -> Iterator[NotMirroredError]:
    """One for each result that is expected to be mirrored and varies."""
    if expected is None:
        return
    for _, keys, state, is_expected in _varying(step, expected):
        if not is_expected:
            continue
        line, path = step.began(state), step.path(keys)
        what, advice = (
            (f"`{step.name}` leaves {path} different on each replica.", OF_OBJECTS)
            if step.is_of_object(keys)
            else (_EXPECTED.format(path=path), OF_RESULTS)
        )
        text = f"{what}\n  it varies since: {step.why(state)}\n{advice}"
        yield NotMirroredError(text, path=path.strip("`"), line=line and str(line))


_EXPECTED = "{path} was expected to be mirrored, but may differ between replicas."
OF_RESULTS = (
    "Something it is computed from was not reduced: use "
    "`get_replica_context().all_reduce('mean', ...)` on the way, usually on the "
    "gradients. If it may differ, take it out of `expect_mirrored`."
)
OF_OBJECTS = (
    "Reduce what it is computed from: the gradients with "
    "`get_replica_context().all_reduce('mean', grads)`, statistics of BatchNorm with "
    "`jaxstrategy.flax.nnx.BatchNorm`; and update metrics with "
    "`jaxstrategy.flax.nnx.update_metrics`, given what each row has, such as losses "
    "before their mean."
)


@dataclasses.dataclass(frozen=True)
class Unstated:
    """A result that varies, and of which nobody has said whether it should.

    Attributes:
      path: how messages call it.
      why: where it began to vary.
    """

    path: str
    why: str


def unstated(step: TracedStep, expected: PyTree) -> dict[int, Unstated]:
    """The unstated results of `step`, by their place among the leaves."""
    return {
        position: Unstated(step.path(keys), step.why(state))
        for position, (keys, state) in _unstated(step, expected).items()
    }


def _unstated(
    step: TracedStep, expected: PyTree
) -> dict[int, tuple[KeyPath, Replication]]:
    if step.num_replicas == 1:  # one replica cannot differ from itself
        return {}
    return {
        position: (keys, state)
        for position, keys, state, is_expected in _varying(step, expected)
        if is_expected is None
    }


def forgotten_reductions(
    step: TracedStep, expected: PyTree
) -> Iterator[tuple[str, str, Line | None]]:
    """A path, a message and a line if state comes out different that went in equal."""
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
    yield step.path(keys).strip("`"), message, step.began(state)


SHOULD_BE_REDUCED = (
    "Something it is computed from was not reduced: use "
    "`get_replica_context().all_reduce('mean', ...)` on the way, usually on the "
    "gradients (for BatchNorm: `jaxstrategy.flax.linen.BatchNorm`; for BatchNorm and "
    "metrics of Keras: what `jaxstrategy.keras` has). If each replica is to have its "
    "own, say so: `RunOptions(expect_mirrored=False)`."
)


def _varying(
    step: TracedStep, expected: PyTree
) -> Iterator[tuple[int, KeyPath, Replication, bool | None]]:
    """The results that vary: position, path, why, and whether they should not."""
    is_expected = expectation(step, expected)
    arrays = step.results.array_paths()
    states = zip(arrays, step.outputs, step.findings.outputs, strict=True)
    for (position, keys), output, state in states:
        if state is not None and state.varies:
            yield position, keys, state, is_expected(position, keys, output)


def expectation(
    step: NamedResults, expected: PyTree
) -> Callable[[int, KeyPath, ArrayType], bool | None]:
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


def _spread(prefix: PyTree, step: NamedResults) -> list[bool | None]:
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


def _is_none(entry: object) -> bool:
    return entry is None
