"""Flax's errors about objects that a step was not given, in our words."""

from __future__ import annotations

import types

from jaxstrategy._errors import ObjectError
from jaxstrategy.text import _user_code


def refused(error: Exception, name: str) -> ObjectError | None:
    """Flax's error about an object that a step captured, in our words."""
    text = str(error)
    is_ours = type(error).__name__ == "TraceContextError" or (
        isinstance(error, ValueError)
        and (
            "different trace level" in text
            # JAX's, about indices into an array that lies on the mesh.
            or ("Context mesh" in text and _went_through_flax(error.__traceback__))
        )
    )
    if not is_ours:
        return None
    line = _user_code.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return ObjectError(
        f"`{name}` changes, or indexes, an object of Flax NNX that it was not given, "
        f"or inside a function that JAX transforms:{where}Pass it as an argument, and "
        "it is changed in place; to such a function too, with `nnx.grad` or `nnx.scan` "
        "instead of JAX's. Objects that a step refers to by name, attribute or "
        "container are found as well, but not those of a generator, a cached function "
        "or a context variable."
    )


def _went_through_flax(traceback: types.TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith("flax.nnx"):
            return True
        traceback = traceback.tb_next
    return False
