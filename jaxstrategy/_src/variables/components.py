"""The copies of variables that `experimental_local_results` has returned.

A copy is a plain array. It is known by identity: as long as somebody holds it and the
variable has not changed, the same object is given again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeAlias

import jax

from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.per_replica import Handle, PerReplica

Divide: TypeAlias = Callable[[jax.Array | PerReplica], tuple[jax.Array, ...]]

# The array of all copies that a variable had, and its copies.
_Reference: TypeAlias = weakref.ref[jax.Array]
_given: weakref.WeakKeyDictionary[Handle, tuple[_Reference | None, list[_Reference]]]
_given = weakref.WeakKeyDictionary()
# By the `id` of a copy: it, and its variable.
_owners: dict[int, tuple[weakref.ref[jax.Array], weakref.ref[Handle]]] = {}


def of(
    variable: Handle, held: jax.Array | PerReplica, divide: Divide
) -> tuple[jax.Array, ...]:
    """The copies of `variable` in this process."""
    array = per_replica.contents(held) if isinstance(held, PerReplica) else held
    if not arrays.is_placed(array):
        return divide(held)
    whole, known = _given.get(variable, (None, []))
    if whole is not None and whole() is array:
        alive = tuple(copy for each in known if (copy := each()) is not None)
        if len(alive) == len(known):
            return alive
    copies = divide(held)
    _given[variable] = weakref.ref(array), [weakref.ref(copy) for copy in copies]
    for copy in copies:
        key = id(copy)
        gone = weakref.ref(copy, lambda _, key=key: _owners.pop(key, None))
        _owners[key] = gone, weakref.ref(variable)
    return copies


def owner_of(value: object) -> Handle | None:
    """The variable of which `value` is a copy, None of other values."""
    found = _owners.get(id(value))
    # An id may be that of another object by now.
    return found[1]() if found is not None and found[0]() is value else None
