"""The names of a generation as a table of Markdown: `table`."""

from __future__ import annotations

from jaxstrategy.compat.port._array_names import ARRAYS
from jaxstrategy.compat.port._contrib_names import CONTRIB
from jaxstrategy.compat.port._distribute_names import DISTRIBUTE
from jaxstrategy.compat.port._generation import Generation
from jaxstrategy.compat.port._method_names import METHODS
from jaxstrategy.compat.port._name import Name
from jaxstrategy.compat.port._old_uses import short
from jaxstrategy.compat.port._other_names import OTHERS
from jaxstrategy.compat.port._v1_names import V1

_ROWS = {
    Generation.TF2: DISTRIBUTE,
    Generation.TF1: V1,
    Generation.CONTRIB: CONTRIB,
}


def table(generation: Generation) -> str:
    """Old names, new names and what differs: names first, then methods."""
    names = [_row(each) for each in _ROWS[generation]]
    methods = [
        _line(f"`.{m.name}`", f"`.{m.new or m.name}`", m.text)
        for m in METHODS
        if generation.value in m.generations
    ]
    return "\n".join([*_HEAD, *names, *methods])


def others() -> str:
    """The same of what is not in `tf.distribute`."""
    return "\n".join([*_HEAD, *map(_row, [*OTHERS, *ARRAYS])])


_HEAD = ["| old | here | what differs, or what to do |", "|:--|:--|:--|"]


def _row(row: Name) -> str:
    return _line(f"`{row.old}`", f"`{short(row.new)}`" if row.new else "", row.text)


def _line(old: str, new: str, text: str) -> str:
    return f"| {old} | {new} | {text} |".replace("|  |", "| |").replace("|  |", "| |")
