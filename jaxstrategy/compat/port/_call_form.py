"""Whether a call means the same under the new name: `fitted`."""

from __future__ import annotations

import re

import libcst as cst

from jaxstrategy.compat.port._edit import Edit
from jaxstrategy.compat.port._name import Form
from jaxstrategy.compat.port._python_program import PythonProgram


def fitted(program: PythonProgram, node: cst.CSTNode, form: Form) -> list[Edit] | None:
    """The changes of a call's arguments; None if it does not mean the same.

    Args:
      program: the program.
      node: the name of the function.
      form: how it may be called.
    """
    call = program.parents.get(node)
    if not (isinstance(call, cst.Call) and call.func is node):
        return [] if form.bare else None
    if any(arg.star for arg in call.args) or not _has_needed(call, form):
        return None
    if form.avoided and re.search(form.avoided, program.code(call)):
        return None
    given = [arg for arg in call.args if arg.keyword is None]
    if len(given) > form.positional or not _takes_first(call, form):
        return None
    edits: list[Edit] = []
    for index, arg in enumerate(call.args):
        if arg.keyword is None:
            continue
        name = arg.keyword.value
        if name == "name" and "name" not in form.keywords and _is_plain(arg.value):
            edits.append(_without(program, call, index))
        elif name not in form.keywords:
            return None
        elif not form.keywords[name]:
            if index != len(given):
                return None
            start, end = program.span(arg)[0], program.span(arg.value)[0]
            edits.append(Edit(start, end, ""))
        elif form.keywords[name] != name:
            edits.append(program.edit(arg.keyword, form.keywords[name]))
    return edits


def _has_needed(call: cst.Call, form: Form) -> bool:
    keywords = {arg.keyword.value for arg in call.args if arg.keyword}
    count = sum(arg.keyword is None for arg in call.args)
    return all(place < count or name in keywords for place, name in form.needed)


def _takes_first(call: cst.Call, form: Form) -> bool:
    if not call.args:
        return True
    first = call.args[0].value
    listed = isinstance(first, cst.List | cst.Tuple | cst.ListComp)
    return (form.lists or not listed) and (form.texts or not _has_text(first))


def _has_text(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.List | cst.Tuple):
        return any(_has_text(each.value) for each in node.elements)
    return isinstance(
        node, cst.SimpleString | cst.FormattedString | cst.ConcatenatedString
    )


def _is_plain(node: cst.BaseExpression) -> bool:
    """Whether leaving it out leaves out nothing that happens."""
    return isinstance(node, cst.SimpleString | cst.Name | cst.FormattedString)


def _without(program: PythonProgram, call: cst.Call, index: int) -> Edit:
    """Leaves out an argument, with the comma before it, or the one behind."""
    start, end = program.span(call.args[index])
    if index > 0:
        return Edit(
            program.span(call.args[index - 1].value)[1], _end(program, call, index), ""
        )
    if len(call.args) > 1:
        return Edit(start, program.span(call.args[1])[0], "")
    return Edit(start, end, "")


def _end(program: PythonProgram, call: cst.Call, index: int) -> int:
    return program.span(call.args[index].value)[1]
