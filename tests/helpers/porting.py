"""The porting tool: `ported(program)`, its command, and the tables of the guide."""

from jaxstrategy._src.compat.port import names as names, program, rewriting
from jaxstrategy._src.compat.port.names import ARRAYS, METHODS, TABLES, Name
from jaxstrategy._src.compat.port.rewriting import short

tables = names
main, ported = rewriting.main, rewriting.ported
Generation, NoPythonError = names.Generation, program.NoPythonError


def table(which: str) -> str:
    names = [*TABLES[which], *(ARRAYS if which == "others" else ())]
    # Names of one module that move to one other, and do not differ, are one row.
    groups: dict[tuple[str, str, str], list[Name]] = {}
    for each in names:
        groups.setdefault(_group(each), []).append(each)
    rows = [("old", "here", "what differs, or what to do"), *map(_row, groups.values())]
    rows += [
        (f"`.{m.name}`", f"`.{m.new}`" if m.new else "the same", m.text)
        for m in METHODS
        if which in m.generations.split()
    ]
    lines = []
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(
            "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
        )
    return "\n".join([lines[0], "|:--|:--|:--|", *lines[1:]])


def _group(name: Name) -> tuple[str, str, str]:
    old, _, last = name.old.rpartition(".")
    if name.new is None:
        return (old if name.text == "" else "", "", name.text)
    new, _, new_last = name.new.rpartition(".")
    is_module = name.exact and name.pattern is None and not name.type
    if new_last != last or is_module:
        return (f"{name.old} itself", name.new, name.text)
    return (old, new, name.text)


def _row(group: list[Name]) -> tuple[str, str, str]:
    first = group[0]
    new = first.new and short(first.new)
    if len(group) == 1:
        return (f"`{first.old}`", f"`{new}`" if new else "", first.text)
    olds = ", ".join(f"`{each.old}`" for each in group)
    modules = {each.old.rpartition(".")[0] for each in group}
    if len(modules) == 1:  # named once
        names = ", ".join(f"`{each.old.rpartition('.')[2]}`" for each in group)
        olds = f"of `{modules.pop()}`: {names}"
    return (olds, f"the same of `{new.rpartition('.')[0]}`" if new else "", first.text)
