"""The place of the array in a variable of Flax NNX, which is read and written there.

Each public way to give a variable another array asks JAX once or twice whether it may
be changed in the trace that runs now: `set_raw_value`, `copy_from`, `nnx.update`. That
takes 2 us (Flax 0.12). A step that has written the variables of a model before, outside
of any trace, knows the answer.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable

from jaxstrategy.tracing.nnx._flax_types import FlaxVariable
from jaxstrategy.values._types import Leaf


def quick_getter(variable: FlaxVariable) -> Callable[[], Leaf]:
    """`variable.get_raw_value`, without a call of Python where that is possible."""
    slot = _slot_of(type(variable))
    if slot is None:
        return variable.get_raw_value
    return functools.partial(slot.__get__, variable)


def quick_setter(variable: FlaxVariable) -> Callable[[Leaf], object] | None:
    """`variable.set_raw_value` that asks nothing; None if it may do more than that."""
    slot = _slot_of(type(variable))
    return None if slot is None else functools.partial(slot.__set__, variable)


@functools.lru_cache(maxsize=1024)
def _slot_of(kind: type) -> types.MemberDescriptorType | None:
    base = sys.modules["flax.nnx"].Variable
    used = ("__setattr__", "get_raw_value", "set_raw_value")
    if any(getattr(kind, name) is not getattr(base, name) for name in used):
        return None
    return _slot_of_values(base)


@functools.cache
def _slot_of_values(base: type) -> types.MemberDescriptorType | None:
    """The slot of the class whose content is the value, whatever Flax calls it."""
    value, other = object(), object()
    variable = base(value, hijax=False, ref=False)
    for slot in vars(base).values():
        is_slot = isinstance(slot, types.MemberDescriptorType)
        if is_slot and slot.__get__(variable, base) is value:
            slot.__set__(variable, other)
            return slot if variable.get_raw_value() is other else None
    return None
