"""A reference to a variable, by which it can be a key: `Reference`."""

from __future__ import annotations

from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Reference(Generic[T]):
    """Stands for one object; equal to other references to that object.

    Args:
      referent: the object, which the reference keeps alive.
    """

    def __init__(self, referent: T) -> None:
        self._referent = referent

    def deref(self) -> T:
        """The object."""
        return self._referent

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._referent is self._referent

    def __hash__(self) -> int:
        return id(self._referent)

    def __repr__(self) -> str:
        return f"<Reference to {self._referent!r}>"
