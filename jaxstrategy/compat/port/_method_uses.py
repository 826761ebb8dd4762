"""Methods of strategies in a program that mean something else here: `method_uses`."""

from __future__ import annotations

import re

import libcst as cst

from jaxstrategy.compat.port._edit import Edit
from jaxstrategy.compat.port._finding import Finding, found
from jaxstrategy.compat.port._generation import Generation
from jaxstrategy.compat.port._method_names import KERAS_METHODS, METHODS, Method
from jaxstrategy.compat.port._uses import Uses


def method_uses(
    uses: Uses, generation: Generation, keras: bool
) -> tuple[list[Edit], list[Finding]]:
    """Methods with other names here, and what differs in others.

    Args:
      uses: what the program uses.
      generation: its own.
      keras: whether it uses Keras 3.
    """
    known = [m for m in METHODS if generation.value in m.generations]
    known = [*KERAS_METHODS, *known] if keras else known
    edits: list[Edit] = []
    findings: list[Finding] = []
    for node in uses.attributes:
        of_name = [m for m in known if m.name == node.attr.value]
        method = next((m for m in of_name if _is_meant(uses, node, m)), None)
        if method is None:
            continue
        if method.new:
            edits.append(uses.program.edit(node.attr, method.new))
        place = uses.program.place(node)
        name = f"{uses.program.code(node.value)}.{method.name}"
        if len(name) > 50 or "\n" in name:
            name = f".{method.name}"
        findings.append(found(name, method.text, place, False))
    return edits, findings


def _is_meant(uses: Uses, node: cst.Attribute, method: Method) -> bool:
    if method.name == "numpy":
        call = uses.program.parents.get(node)
        return isinstance(call, cst.Call) and call.func is node and not call.args
    receiver = uses.program.code(node.value)
    return not method.receiver or bool(re.search(method.receiver, receiver))
