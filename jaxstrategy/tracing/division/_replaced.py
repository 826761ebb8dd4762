"""The arguments that results take the place of, as far as where they lie matters.

To lie like another array changes no number, so that here a guess will do: what the
checks of a step must be sure of, `successors`, comes first, and then the argument of
the same type whose name is most like that of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.tracing._jaxpr_types import ArrayType, KeyPath
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._successors import successors


def replaced_arguments(step: TracedStep) -> dict[int, int]:
    """For each result that is like an argument which argument.

    Both are counted among those that are arrays. Only what is equal on all replicas
    counts.
    """
    sure = successors(step)
    objects = {step.label(i): i for i in step.same_arguments}
    alike: dict[tuple[object, ...], list[int]] = {}
    for argument in step.same_arguments:
        alike.setdefault(_kind(step.type_of(argument)), []).append(argument)
    found: dict[int, int] = {}
    for number, (position, path) in enumerate(step.results.array_paths()):
        if step.trace.varies[number]:
            continue
        candidates = alike.get(_kind(step.outputs[number]), ())
        argument = sure.get(position)
        if step.is_of_object(path):  # the new array of an argument of that name
            argument = objects.get(step.path(path))
        elif argument is None and candidates:
            argument = _most_alike(step, path, candidates)
        if argument is not None:
            found[number] = argument
    return found


def _most_alike(step: TracedStep, path: KeyPath, candidates: Sequence[int]) -> int:
    """The argument whose path is most like that of a result."""

    def likeness(argument: int) -> tuple[int, int]:
        other = step.key_path_of(argument)
        return _common_end(path, other), -abs(len(path) - len(other))

    return max(candidates, key=likeness)


def _kind(aval: ArrayType) -> tuple[object, ...]:
    return aval.shape, aval.dtype


def _common_end(one: KeyPath, other: KeyPath) -> int:
    """The number of keys that two paths have in common at their ends."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count
