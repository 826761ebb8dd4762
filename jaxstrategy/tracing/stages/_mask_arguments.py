"""The masks among a step's arguments, and whether the step does right by them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import final

from jax.core import Tracer

from jaxstrategy._errors import PaddedRowsWarning
from jaxstrategy._options import RunOptions
from jaxstrategy.masks import _filled_rows, _step_masks
from jaxstrategy.masks._step_masks import BatchArray, StepMasks
from jaxstrategy.text import _user_code
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing._roles import Role
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.values import _arrays
from jaxstrategy.values._types import Leaf


@final
class MaskArguments(Stage):
    """The masks among a program's arguments, and what its traces did with them.

    Args:
      step: the step.
      options: not asked.
    """

    def __init__(self, step: ReplicaStep, options: RunOptions) -> None:
        self._places = [i for i, role in enumerate(step.roles) if role is Role.MASK]
        self._step = step
        # What the step asked, known once it is traced.
        self._is_traced = False
        self._is_asked_for = False
        self._keeps_rows = False
        self._alike: set[tuple[int, ...]] = set()
        # Each warning is given once; and once more where JAX traces what calls.
        self._told: set[tuple[Callable[[str], str], bool]] = set()

    @property
    def is_active(self) -> bool:
        """Whether there is a mask among the arguments that has to be looked at."""
        is_settled = self._is_traced and self._is_asked_for and not self._keeps_rows
        return bool(self._places) and (bool(self._alike) or not is_settled)

    @contextlib.contextmanager
    def tracing(self, own: Sequence[Leaf]) -> Iterator[None]:
        """A `with` block in which the step can ask which rows are real."""
        batches = StepMasks([BatchArray(own[i - 1], own[i], i) for i in self._places])
        with _step_masks.given(batches):
            yield
        self._is_traced = True
        self._is_asked_for |= batches.asked
        self._keeps_rows |= batches.kept
        self._alike |= batches.alike

    def before(self, leaves: Sequence[Leaf]) -> None:
        """Checks whether a call is one that the step does right by.

        Before the first trace nothing is known of that. Warns, once, if rows that are
        not real go into a step that asks for no mask, or gathers them; or if they may,
        and nobody will know.

        Raises:
          ValueError: the step took the masks of two batches for one.
        """
        for places in self._alike:
            self._check_alike(places, [leaves[i] for i in places])
        if self._is_traced and (self._keeps_rows or not self._is_asked_for):
            self._check_used([leaves[i] for i in self._places])

    def _check_used(self, masks: list[Leaf]) -> None:
        if any(isinstance(mask, Tracer) for mask in masks):
            told = _may_be_unmasked
        elif any(map(_filled_rows.is_noted, masks)):
            told = _gathered if self._is_asked_for else _unmasked
        else:
            return
        turn = told, _arrays.is_traced()
        if turn not in self._told:
            self._told.add(turn)
            _user_code.warn(told(self._step.name), PaddedRowsWarning)

    def _check_alike(self, places: tuple[int, ...], masks: list[Leaf]) -> None:
        first, *others = masks
        if any(isinstance(mask, Tracer) for mask in masks):
            return  # of one array there can be several
        if all(mask is first for mask in others):
            return
        names = ", ".join(self._step.label(i - 1) for i in places)
        raise ValueError(
            f"`{self._step.name}` was given {names}, of different batches with equal "
            "numbers of rows, and asked which rows of something computed from them are "
            "real. Say which batch is meant, with an argument of the step itself: "
            "`masked_mean(losses, mask=batch_mask(images))`."
        )


def check_traced(masks: StepMasks, name: str) -> None:
    """Checks whether a function that was traced does right by batches with masks.

    Args:
      masks: of batches that are not full.
      name: of the function.

    Raises:
      ValueError: it took the masks of two batches for one.
    """
    for places in masks.alike:
        if len(set(places)) > 1:
            raise ValueError(
                f"`{name}` takes several batches with equal numbers of rows, and asked "
                "which rows of something computed from them are real. Say which batch "
                "is meant: `masked_mean(losses, mask=batch_mask(images))`, with an "
                "array of that batch itself."
            )
    if masks.kept or not masks.asked:
        told = _gathered if masks.asked else _unmasked
        _user_code.warn(told(name), PaddedRowsWarning)


def _gathered(name: str) -> str:
    return (
        f"`{name}` was given a batch that is filled up with copies of its last row, "
        "and gathers an array of it in `merge_call`, where shapes are static, so that "
        "the copies stay in the result. Return the array and gather it outside the "
        "step, where they are left out; or gather `batch_mask(array)` as well, which "
        "says which rows are real."
    )


def _may_be_unmasked(name: str) -> str:
    return (
        f"`{name}` is given batches of a dataset inside a function that JAX traces "
        "(`jax.jit`), and never asks which of their rows are real. If one is filled up "
        "with copies of its last row, these count in its sums and means, and no later "
        "warning can say so. Use `masked_mean` or `masked_sum` for them, or "
        '`batch_mask`; or choose `InputOptions(remainder="drop")` or `"error"`, with '
        "which all rows are real."
    )


def _unmasked(name: str) -> str:
    return (
        f"`{name}` was given a batch that is filled up with copies of its last row, "
        "and never asked which rows are real, so that the copies count in its sums and "
        "means. Use `masked_mean` or `masked_sum` for them, or `batch_mask`; or leave "
        'out the rest with `InputOptions(remainder="drop")`.'
    )
