"""Format strings of `jax.debug.print` that know of replicas: `NumberedText`."""

from __future__ import annotations

import re
from typing import Any, final

import jax


@final
class OneText(str):
    """A format string of what is printed once for all replicas."""

    __slots__ = ()


@final
class NumberedText(str):
    """A format string of the leaves of some arguments, and the number of a replica.

    Attributes:
      structure: of the arguments, positional ones and those by name.
      has_fields: whether it has fields for them; else they follow it.
      is_said: whether the number stands before each line. XLA ends a program of a
        single replica of several devices that prints and is given nothing (JAX 0.10 and
        0.12), so there is one in any case.
    """

    __slots__ = ("has_fields", "is_said", "structure")

    structure: Any  # a `PyTreeDef`; in JAX 0.12 of another registry than the usual one
    has_fields: bool
    is_said: bool

    @classmethod
    def of(
        cls, text: str, structure: object, has_fields: bool, is_said: bool
    ) -> NumberedText:
        """One of the format string `text`."""
        made = cls(text)
        made.structure, made.has_fields = structure, has_fields
        made.is_said = is_said
        return made

    def format(self, *given: object, **named: object) -> str:
        """The text, of the leaves and then the number."""
        *leaves, number = given
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        if self.has_fields:
            text = super().format(*args, **kwargs)
        else:
            text = " ".join((self, *map(str, args)))
        if not self.is_said:
            return text
        return re.sub(r"\A|(?<=\n)(?!\Z)", f"replica {number}: ", text)

    # JAX lowers equations with equal parameters once.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberedText) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    @property
    def _parts(self) -> tuple[object, ...]:
        return str(self), self.structure, self.has_fields, self.is_said
