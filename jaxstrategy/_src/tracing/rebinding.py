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

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import LeakedTracerError
from jaxstrategy._src.text import Line, and_more
from jaxstrategy._src.tracing.references import (
    UNBOUND,
    Binding,
    References,
    code_of,
    substituted,
)
from jaxstrategy._src.values.arrays import Function

# A Keras model of a hundred layers has about twenty thousand.
_MAX_NODES = 50_000


class Leak(Exception):
    """A tracer outlives its trace; `as_error` may be called once that has ended."""

    def __init__(
        self, fn: Function, name: str, labels: Sequence[str], value: Tracer, keras: bool
    ) -> None:
        self._code = code_of(fn)
        self._name = name
        self._labels = labels
        self._value = value
        self._is_keras = keras

    def as_error(self) -> LeakedTracerError:
        """The error for the user, with the line where the tracer was made."""
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
    """The user's line that made a tracer whose trace has ended."""
    try:
        jnp.negative(tracer)
    except jax.errors.UnexpectedTracerError as error:
        # JAX says it in its message only: the line, then the frames around it.
        frames = re.findall(
            r"(?:line |^)(/.+?|<.+?>):(\d+)(?::\d+)? \(", str(error), re.M
        )
        known = [(file, int(number)) for file, number in [*frames[:1], *frames[:0:-1]]]
        return text.innermost(known, libraries=False)
    except Exception:
        pass
    return None


@contextlib.contextmanager
def checking_leaks(
    fn: Function, name: str, statics: Sequence[tuple[str, object]] = ()
) -> Iterator[None]:
    """A `with` block for tracing; raises `Leak` if `fn` or `statics` hold a tracer.

    Whatever the tracers replaced is put back.
    """

    def references() -> References:
        return References(fn, limit=_MAX_NODES, with_key=False, more=statics)

    before = references()
    try:
        yield
    except BaseException:
        _restore(references(), before)
        raise
    if leaked := _restore(references(), before):
        labels, values, owners = zip(*leaked, strict=True)
        raise Leak(fn, name, labels, values[0], any(map(_is_keras, owners)))


def _restore(after: References, before: References) -> list[tuple[str, Tracer, Any]]:
    """Puts back what new tracers replaced; returns label, tracer and its owner."""
    nodes = after.nodes
    # `before` keeps its values alive, so that no new value has the `id` of one.
    known = {id(node.value) for node in before.nodes}
    old = {n.binding.identity: n.value for n in before.nodes if n.binding is not None}
    leaked, bindings = [], {}
    for index, (label, _, value, _) in enumerate(nodes):
        if not isinstance(value, Tracer) or id(value) in known:
            continue
        holder = next((n for n in after.ancestors(index) if nodes[n].binding), None)
        if holder is None:
            continue
        binding, parent = nodes[holder].binding, nodes[holder].parent
        assert binding is not None
        bindings[binding.identity] = binding
        owner = nodes[parent].value if parent >= 0 else None
        if _is_keras(owner):
            label = _label_in_keras(after, index, owner) or label
        leaked.append((label, value, owner))
    # From the end of a list, so that earlier indices stay valid.
    for identity, binding in sorted(
        bindings.items(),
        key=lambda item: -item[1].key if isinstance(item[1].owner, list) else 1,
    ):
        binding.set(old.get(identity, UNBOUND))
    return leaked


def _label_in_keras(found: References, index: int, owner: object) -> str | None:
    """The outermost Keras object that holds a variable, and the variable's path."""
    nodes = [found.nodes[above] for above in found.ancestors(index)]
    label = next((n.label for n in reversed(nodes) if _is_keras(n.value)), None)
    path = getattr(owner, "path", None)
    return f"{label}: {path}" if isinstance(path, str) else label


def _is_keras(owner: object) -> bool:
    # A user's own model is of a class of Keras, too.
    return any(base.__module__.startswith("keras.") for base in type(owner).__mro__)


# Held while a function is traced with substitutes for what it captures.
rebinding_lock = threading.RLock()
# By `id`: what a thread that traces has bound, in place of what, and the thread.
_substitutes: dict[int, tuple[object, object, int]] = {}
# Another object after each change.
_version = object()
_MAX_ATTEMPTS = 5


def references(fn: Function) -> References:
    """What `fn` captures, and nothing that another thread's trace has substituted."""
    for _ in range(_MAX_ATTEMPTS):
        version, found = _version, References(fn)
        is_original = not _substitutes or all(
            _original(node.value) is node.value for node in found.nodes
        )
        if is_original and version is _version:
            return found
    with rebinding_lock:
        return References(fn)


def original_value(binding: Binding) -> object:
    """The value of a binding, whatever another thread's trace has substituted."""
    while True:
        version, value = _version, _original(binding.get())
        if version is _version:
            return value


def _original(value: object) -> object:
    while (known := _substitutes.get(id(value))) and known[2] != threading.get_ident():
        value = known[1]
    return value


@contextlib.contextmanager
def rebound(fn: Function, replaced: Mapping[str, object]) -> Iterator[Function]:
    """A `with` block in which `fn` captures other values, given by label."""
    if not replaced:
        # Arrays that are constants must not be those of another thread's trace.
        is_eager = context.current().eager is not None
        waits = not is_eager and bool(References(fn, with_key=False).arrays)
        with rebinding_lock if waits else contextlib.nullcontext():
            yield fn
        return
    if (eager := context.current().eager) is not None:
        # Other threads of this step wait meanwhile, and may ask for the lock.
        rebindings = _rebindings(fn, replaced)
        with eager.rebinding(rebindings):
            yield rebindings.function
        return
    with rebinding_lock:
        rebindings = _rebindings(fn, replaced)
        try:
            rebindings.set()
            yield rebindings.function
        finally:
            rebindings.take_back()


def _rebindings(fn: Function, replaced: Mapping[str, object]) -> FunctionRebindings:
    labelled = references(fn)  # as when the values were taken
    known = {**labelled.objects, **labelled.arrays}
    return FunctionRebindings(fn, {id(known[k]): new for k, new in replaced.items()})


@final
class FunctionRebindings:
    """Substitutes, by `id`, for values that a function captures, while it is traced."""

    def __init__(self, fn: Function, substitutes: Mapping[int, object]) -> None:
        references = References(fn, with_key=False)
        self.function: Function = substituted(references.root, substitutes)
        # Each binding with its original value and the substitute.
        self._rebound: list[tuple[Binding, object, object]] = []
        for node in references.nodes_with(set(substitutes)):
            assert node.binding is not None
            new = substituted(node.value, substitutes)
            if new is not node.value:
                self._rebound.append((node.binding, node.value, new))

    def set(self) -> None:
        """Binds the substitutes."""
        global _version
        # First, so that lookups of other threads notice it.
        for _, value, new in self._rebound:
            _substitutes[id(new)] = new, value, threading.get_ident()
        _version = object()
        for binding, _, new in self._rebound:
            binding.set(new)

    def take_back(self) -> None:
        """Binds the original values again."""
        global _version
        for binding, value, new in reversed(self._rebound):
            if binding.get() is new:  # else the function has assigned another
                binding.set(value)
        _version = object()  # before another thread can take a substitute for a value
        for _, _, new in self._rebound:
            _substitutes.pop(id(new), None)
