"""The names of a step's parameters, and the signature of several steps as one."""

from __future__ import annotations

import inspect

from jaxstrategy.values._types import Function


def name_of(fn: Function) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def signature_of(fn: Function) -> inspect.Signature | None:
    """The signature of the step, with batches instead of a batch."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in POSITIONAL]
    if not positional or "batches" in signature.parameters:
        return signature
    place = parameters.index(positional[-1])
    parameters[place] = parameters[place].replace(name="batches")
    return signature.replace(parameters=parameters)


POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def first_names(fn: Function, count: int) -> list[str]:
    """The names of the first arguments in messages."""
    signature = signature_of(fn)
    parameters = [] if signature is None else signature.parameters.values()
    known = [p.name for p in parameters if p.kind in POSITIONAL]
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(count)]
