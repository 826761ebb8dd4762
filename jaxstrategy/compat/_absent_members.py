"""Members that today's classes have and those of older generations lack."""

from __future__ import annotations

from typing import NoReturn


def missing_member(face: object, core: object, name: str, way: str) -> NoReturn:
    """Raises the error for an attribute that `face` does not have.

    Args:
      face: an object of an older generation.
      core: the one of today over which it stands.
      name: the attribute.
      way: how the user comes to `core`, in code.

    Raises:
      AttributeError: always. If `core` has such a public attribute, it says so.
    """
    text = f"{type(face).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_") and hasattr(type(core), name):
        text += f", which is younger: `{way}.{name}` is today's"
    raise AttributeError(f"{text}.", name=name, obj=face)
