"""Replaces captured values while a function is traced, and finds leaked tracers."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import LeakedTracerError
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import and_more
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing.functions import code
from jaxstrategy._src.tracing.functions.places import GONE, Index, Place, rebuilt
from jaxstrategy._src.tracing.functions.references import References, Referred
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
    given: Sequence[tuple[str, object]] = (),
) -> Iterator[None]:
    """A `with` block in which a step may leave no values of its trace."""

    def look() -> References:
        return References(fn, limit=_LIMIT, with_form=False, more=given)

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


# Held while a function is traced that refers to other values.
one_at_a_time = threading.RLock()
# The present rebindings, another object whenever these change.
_active: list[FunctionRebindings] = []
_version = object()
_MOST_LOOKS = 5


def references(fn: Function) -> References:
    """What `fn` refers to, and nothing that another thread's trace has rebound."""
    for _ in range(_MOST_LOOKS):
        version, active = _version, list(_active)
        found = References(fn)
        if version is _version:
            if any(rebindings.are_met_in(found) for rebindings in active):
                break
            return found
    with one_at_a_time:
        return References(fn)


def callers_value(place: Place) -> object:
    """The value of a place, whatever another thread's trace has rebound."""
    while True:
        version, found = _version, place.get()
        for rebindings in reversed(_active):
            found = rebindings.callers_value(place, found)
        if version is _version:
            return found


@contextlib.contextmanager
def rebound(fn: Function, replaced: Mapping[str, object]) -> Iterator[Function]:
    """`fn`, which refers to other values for the length of the `with` block."""
    if not replaced:
        yield fn
        return
    if (eager := context.current().eager) is not None:
        # Others of its threads wait meanwhile, and may ask for the lock.
        rebindings = FunctionRebindings(fn, replaced)
        with eager.rebinding(rebindings):
            yield rebindings.function
        return
    with one_at_a_time:
        rebindings = FunctionRebindings(fn, replaced)
        try:
            rebindings.set()
            yield rebindings.function
        finally:
            rebindings.take_back()


@final
class FunctionRebindings:
    """The places where a function refers to something else for a while."""

    def __init__(
        self,
        fn: Function,
        replaced: Mapping[str, object],
    ) -> None:
        labelled = references(fn)  # as when the values were taken
        known = {**labelled.objects, **labelled.arrays}
        self._references = References(fn, with_form=False)
        self._others = {id(known[label]): new for label, new in replaced.items()}
        self.function: Function = rebuilt(self._references.root, self._others)
        self._rebound: list[tuple[Place, object, object]] | None = None
        self._thread = 0

    def set(self) -> None:
        """Let the function refer to the other values."""
        global _version
        # First, so that whoever looks meanwhile knows of it.
        self._thread = threading.get_ident()
        _active.append(self)
        _version = object()
        if self._rebound is None:
            self._rebound = []
            for step in self._references.holders(set(self._others)):
                assert step.place is not None
                new = rebuilt(step.value, self._others)
                self._rebound.append((step.place, step.value, new))
                step.place.set(new)
            return
        for place, _, new in self._rebound:
            place.set(new)

    def take_back(self) -> None:
        """Let it refer to the caller's."""
        global _version
        for place, value, new in reversed(self._rebound or ()):
            if place.get() is new:  # else the function has put another there
                place.set(value)
        _active.remove(self)
        _version = object()

    def callers_value(self, place: Place, found: object) -> object:
        """What was in a place if that is rebound; else `found`."""
        if self._thread != threading.get_ident():
            for other, value, new in self._rebound or ():
                if new is found and other.where == place.where:
                    return value
        return found

    def are_met_in(self, found: References) -> bool:
        """Whether another thread than theirs uses what is rebound."""
        if self._thread == threading.get_ident():
            return False
        rebound = {id(new) for _, _, new in self._rebound or ()}
        rebound |= {id(new) for new in self._others.values()}
        return any(id(each.value) in rebound for each in found.reached)
