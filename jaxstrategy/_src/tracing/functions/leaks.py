"""Values of a trace that a step leaves where they stay after it.

They hold no numbers, and whoever uses them later gets JAX's error, far from the cause.
What a step refers to is looked through before it is traced and after; where a tracer
stands then, the old value is put back, and the step is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxstrategy._src.errors import LeakedTracerError
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import and_more
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing.functions import code
from jaxstrategy._src.tracing.functions.references import References
from jaxstrategy._src.tracing.functions.walk import GONE, Index, Referred
from jaxstrategy._src.values.arrays import Function

# A Keras model of a hundred layers has about twenty thousand.
_LIMIT = 50_000


class Leak(Exception):
    """A step left values of its trace behind; `explained` when the trace has ended."""

    def __init__(
        self,
        fn: Function,
        name: str,
        labels: Sequence[str],
        value: Tracer,
        keras: bool,
    ) -> None:
        self._code = code.code_of(fn)
        self._name = name
        self._labels = labels
        self._value = value
        self._is_keras = keras

    def explained(self) -> LeakedTracerError:
        """The error, with the line where the value was made."""
        line = _line_of(self._value)
        made = "made"
        if line is None and self._code is not None:  # an argument is made nowhere
            line, made = Line(self._code.co_filename, self._code.co_firstlineno), "in"
        more = and_more(len(self._labels), 1, before="")
        others = f" ({more})" if more else ""
        where = f", {made}\n  {line}\n" if line else ". "
        advice = (
            "Keras changes its variables in place, which a compiled step cannot give "
            "back: call `model.stateless_call(...)` and `optimizer.stateless_apply("
            "...)`, and let the step take and return their variables."
            if self._is_keras
            else "Return the value from the step, or assign it to a "
            "`jaxstrategy.Variable`."
        )
        kind = jax.typeof(self._value).str_short()
        return LeakedTracerError(
            f"`{self._name}` left a value of its trace, {kind}, in "
            f"`{self._labels[0]}`{others}{where}"
            "It stands for a number that only the devices will know, and is of no use "
            f"after the step. {advice} What the place held before is there again."
        )


def _line_of(tracer: Tracer) -> Line | None:
    """The user's line where a value was made, of a trace that has ended."""
    try:
        jnp.negative(tracer)
    except jax.errors.UnexpectedTracerError as error:
        # JAX tells it in no other way: the line, then the frames around it.
        frames = re.findall(
            r"(?:line |^)(/.+?|<.+?>):(\d+)(?::\d+)? \(", str(error), re.M
        )
        known = [(file, int(number)) for file, number in [*frames[:1], *frames[:0:-1]]]
        return user_code.innermost(known, libraries=False)
    except Exception:
        pass
    return None


@contextlib.contextmanager
def refused(
    fn: Function,
    name: str,
    is_object: Callable[[object], bool],
    given: Sequence[tuple[str, object]] = (),
) -> Iterator[None]:
    """A `with` block in which a step may leave no values of its trace."""

    def look() -> References:
        return References(fn, is_object, _LIMIT, with_form=False, more=given)

    before = look()
    try:
        yield
    except BaseException:
        _restore(look(), before)
        raise
    left = _restore(look(), before)
    if left:
        labels, values, owners = zip(*left, strict=True)
        keras = any(map(_is_keras, owners))
        raise Leak(fn, name, labels, values[0], keras)


def _restore(after: References, before: References) -> list[tuple[str, Tracer, Any]]:
    """Puts back what tracers took the place of; returns label, tracer and owner."""
    # `before` keeps its values, so that no new value has the `id` of one.
    known = {id(step.value) for step in before.reached}
    new = {
        number
        for number, step in enumerate(after.reached)
        if isinstance(step.value, Tracer) and id(step.value) not in known
    }
    if not new:
        return []
    old = {s.place.where: s.value for s in before.reached if s.place is not None}
    found, holders = [], {}
    for number in sorted(new):
        value, label = after.reached[number].value, after.reached[number].label
        holder = _holder(after.reached, number)
        if holder is not None and holder.place is not None:
            holders[holder.place.where] = holder.place
            owner = after.reached[holder.parent].value if holder.parent >= 0 else None
            label = _label_in_keras(after.reached, number, owner) or label
            found.append((label, value, owner))
    # From the end of a list, so that places before stay what they are.
    for where, place in sorted(
        holders.items(),
        key=lambda item: -item[1].index if isinstance(item[1], Index) else 1,
    ):
        place.set(old.get(where, GONE))
    return found


def _holder(steps: Sequence[Referred], number: int) -> Referred | None:
    while steps[number].place is None:
        number = steps[number].parent
        if number < 0:
            return None
    return steps[number]


def _label_in_keras(
    steps: Sequence[Referred], number: int, owner: object
) -> str | None:
    """The object of Keras that a variable belongs to, and its path."""
    if not _is_keras(owner):
        return None
    label = None
    while number >= 0:
        if _is_keras(steps[number].value):
            label = steps[number].label
        number = steps[number].parent
    path = getattr(owner, "path", None)
    return f"{label}: {path}" if isinstance(path, str) else label


def _is_keras(owner: object) -> bool:
    # A user's own model is of a class of Keras, too.
    return any(base.__module__.startswith("keras.") for base in type(owner).__mro__)
