"""What each name of TensorFlow is called here: `tables.toml`, read."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

DATA: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text("utf-8")
)


def _pairs(words: str) -> dict[str, str]:
    """`"a b=c d="` as `{"a": "a", "b": "c", "d": ""}`."""
    found = (word.partition("=") for word in words.split())
    return {old: new if sign else old for old, sign, new in found}


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
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
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


_FORMS = {
    name: Form(**{**form, "keywords": _pairs(form.get("keywords", ""))})
    for name, form in DATA["forms"].items()
}


def _rows(table: str) -> Iterator[Name]:
    for group in DATA[table]:
        old, new = group.pop("old", ""), group.pop("new", None)
        texts, text = group.pop("texts", {}), group.pop("text", "")
        form = _FORMS.get(group.pop("form", ""))
        if table == "arrays":
            group |= {"exact": True, "certain": False}
        for name, here in _pairs(group.pop("names")).items():
            full = f"{old}.{name}" if old else name
            target = f"{new}.{here}" if new else here if new == "" else None
            given = {"exact": new == "", **group}
            told = text or texts.get(name, "")
            yield Name(full, target, told, form=form, **given)


TABLES = {
    each: tuple(_rows(each)) for each in ("tf2", "tf1", "2018", "arrays", "others")
}
ARRAYS = TABLES["arrays"]
ROWS = tuple(row for rows in TABLES.values() for row in rows)
NAMES = {row.old: row for row in ROWS}


def row_of(name: str) -> Name:
    """The row of a name of TensorFlow: its own, or of the nearest thing above it."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        row = NAMES.get(".".join(parts[:end]))
        if row is not None and (end == len(parts) or row.new is None or not row.exact):
            return row
    return NAMES["tf"]


@final
@dataclasses.dataclass(frozen=True)
class Method:
    """A method that programs of some generations call.

    Args:
      name: of the method or property.
      generations: by their short names.
      text: how it differs.
      receiver: a pattern of the objects that are meant; none: the name is a
        strategy's or context's only.
      new: its name here, if it has another.
    """

    name: str
    generations: str
    text: str = ""
    receiver: str = ""
    new: str = ""


METHODS = tuple(Method(**row) for row in DATA["methods"])
# Of programs whose `tf.keras` becomes Keras 3.
KERAS_METHODS = tuple(Method(**row) for row in DATA["keras_methods"])


def words(name: str) -> frozenset[str]:
    """One of the lists of names by which a program's generation is known."""
    return frozenset(DATA["words"][name].split())
