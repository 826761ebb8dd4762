"""An object as a key that does not keep it alive: `Identity`."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class Identity:
    """Equal for the same object, as long as it lives; keeps it alive if need be."""

    __slots__ = ("_id", "_get")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self._get = weakref.ref(value)
        except TypeError:  # its type allows no weak references
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        # An object that is gone may have left its `id` to another.
        mine = self._get()
        return mine is not None and mine is other._get()

    def __hash__(self) -> int:
        return self._id

    def watched(
        self, gone: Callable[[weakref.ref[object]], object]
    ) -> weakref.ref[object] | None:
        """A reference that calls `gone` when the object is, as long as it is kept."""
        value = self._get()
        try:
            return None if value is None else weakref.ref(value, gone)
        except TypeError:
            return None

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be equal any more."""
        return self._get() is None

    def __repr__(self) -> str:
        value = self._get()
        return (
            "an object that is gone" if value is None else f"a {type(value).__name__}"
        )
