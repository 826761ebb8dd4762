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


def table(which: str) -> str:
    """Old names, new names and what differs: names first, then methods.

    Args:
      which: a generation's short name, or "others": what is not in `tf.distribute`.
    """
    if which == "others":
        return "\n".join([*_HEAD, *_rows([*OTHERS, *ARRAYS])])
    methods = [
        _line(f"`.{m.name}`", f"`.{m.new}`" if m.new else "the same", m.text)
        for m in METHODS
        if which in m.generations
    ]
    return "\n".join([*_HEAD, *_rows(_ROWS[Generation(which)]), *methods])


_HEAD = ["| old | here | what differs, or what to do |", "|:--|:--|:--|"]


def _rows(names: list[Name]) -> list[str]:
    """Names of one module that move to one other, and do not differ, are one row."""
    groups: dict[tuple[str, str, str], list[Name]] = {}
    for each in names:
        groups.setdefault(_group(each), []).append(each)
    return [_row(group) for group in groups.values()]


def _group(name: Name) -> tuple[str, str, str]:
    """What names of one row have in common."""
    old, _, last = name.old.rpartition(".")
    if name.new is None:
        return (old if name.text == "" else "", "", name.text)
    new, _, new_last = name.new.rpartition(".")
    is_module = name.exact and name.form is None and not name.type
    if new_last != last or is_module:
        return (f"{name.old} itself", name.new, name.text)
    return (old, new, name.text)


def _row(group: list[Name]) -> str:
    first = group[0]
    olds = _olds(group)
    if first.new is None or len(group) == 1:
        new = f"`{short(first.new)}`" if first.new else ""
        return _line(olds, new, first.text)
    return _line(olds, f"the same of `{_module(first.new)}`", first.text)


def _olds(group: list[Name]) -> str:
    """The old names, with their module once if it is one."""
    modules = {each.old.rpartition(".")[0] for each in group}
    if len(group) == 1 or len(modules) > 1:
        return ", ".join(f"`{each.old}`" for each in group)
    names = ", ".join(f"`{each.old.rpartition('.')[2]}`" for each in group)
    return f"of `{modules.pop()}`: {names}"


def _module(new: str) -> str:
    return short(new).rpartition(".")[0]


def _line(old: str, new: str, text: str) -> str:
    cells = [cell.replace("|", "\\|") for cell in (old, new, text)]
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
