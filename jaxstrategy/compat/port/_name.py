"""One row of the table of old names: `Name`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Form:
    """How a function may be called so that the new one means the same.

    Args:
      positional: the most arguments without a name.
      keywords: the new name of each argument that may be named; without one, it is
        given by its place.
      needed: arguments that must be given, each by its place or its old name.
      texts: whether the first argument may be a string.
      lists: whether it may be a list.
      avoided: a pattern of arguments' code for which it does not mean the same.
      bare: whether the function may be passed on without being called.
    """

    positional: int
    keywords: dict[str, str] = dataclasses.field(default_factory=dict)
    needed: tuple[tuple[int, str], ...] = ()
    texts: bool = True
    lists: bool = True
    bare: bool = True
    avoided: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Name:
    """An old name, what stands for it here, and what a person must know.

    Args:
      old: with its modules, `tf.` first.
      new: with its modules; None if a person must decide.
      text: how the new one differs; without one, what to do.
      exact: names in it, or attributes of it, are not the same here; a module's names
        have rows of their own.
      form: which calls are the same; None: all.
      stays: it may stay TensorFlow's.
      certain: False if it means the same only where values are arrays of JAX, not in
        what stays TensorFlow.
      type: it is a type, which is the same only as an argument of a function that is
        renamed, or as an annotation.
    """

    old: str
    new: str | None
    text: str = ""
    exact: bool = False
    form: Form | None = None
    stays: bool = False
    certain: bool = True
    type: bool = False


def renamed(
    old: str, new: str, names: str, texts: dict[str, str] | None = None
) -> list[Name]:
    """Rows of names that keep their last part, in other modules.

    Args:
      old: the modules there.
      new: the modules here.
      names: separated by spaces.
      texts: how those differ that do.
    """
    texts = texts or {}
    rows = [Name(f"{old}.{n}", f"{new}.{n}", texts.get(n, "")) for n in names.split()]
    assert texts.keys() <= set(names.split())
    return rows


def decided(module: str, rows: dict[str, str]) -> list[Name]:
    """Rows of what a person must decide: advice by names, separated by spaces."""
    return [
        Name(f"{module}.{name}", None, text)
        for names, text in rows.items()
        for name in names.split()
    ]


def modules(pairs: Sequence[tuple[str, str]]) -> list[Name]:
    """Rows of modules, old and new."""
    return [Name(old, new, exact=True) for old, new in pairs]
