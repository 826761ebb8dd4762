"""Makes code in backquotes a link to the API where it is a public name.

`js.Variable`, `strategy.run(step, batch)` and `js.ReduceOp.SUM` are links; a name after
`js.` that is not there is a warning.
"""

from __future__ import annotations

import functools
import importlib
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

LOGGER = logging.getLogger(__name__)
# `js.Variable`, `strategy.run(step, batch)`, `reduce`.
CODE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:[(\[].*)?", re.DOTALL)
# What the first words of names stand for, the longest first.
MEANINGS = {
    "strategy.extended.": ["jaxstrategy.StrategyExtended."],
    "strategy.": ["jaxstrategy.Strategy.", "jaxstrategy.ParameterServerStrategy."],
    "js.": ["jaxstrategy."],
    "jaxstrategy.": ["jaxstrategy."],
}
# Where classes are that the prose names without their module.
HOMES = [
    "jaxstrategy",
    "jaxstrategy.errors",
    "jaxstrategy.training",
    "jaxstrategy.checkpoint",
    "jaxstrategy.experimental",
    "jaxstrategy.profiling",
]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace each literal that names an entry by a link that shows it."""
    entries = app.env.domains["py"].data["objects"]
    for literal in list(doctree.findall(nodes.literal)):
        code = literal.astext()
        found = [entry_of(name, entries) for name in targets(code, owners(literal))]
        name = next(filter(None, found), None)
        if name is None and found and code.startswith("js."):
            LOGGER.warning("`%s` is no public name", code, location=literal)
        elif name and not is_link(literal):
            entry = entries[name]
            shown = literal.deepcopy()
            literal.replace_self(
                make_refnode(app.builder, page, entry.docname, entry.node_id, shown)
            )


def targets(code: str, owners: list[str]) -> list[str]:
    """The full names that some code may mean, the likeliest first.

    >>> targets("js.batches(x)", [])
    ['jaxstrategy.batches']
    >>> targets("restore(5)", ["jaxstrategy.checkpoint.CheckpointManager"])
    ['jaxstrategy.checkpoint.CheckpointManager.restore']
    >>> targets("x + 1", [])
    []
    """
    match = CODE.fullmatch(code)
    if match is None:
        return []
    start = next((start for start in MEANINGS if code.startswith(start)), None)
    if start:
        return [full + match[1].removeprefix(start) for full in MEANINGS[start]]
    homes = HOMES if match[1][0].isupper() else []
    return [f"{home}.{match[1]}" for home in [*owners, *homes]]


def owners(node: nodes.Node) -> list[str]:
    """The classes and the module whose entry a node is in; none for an argument."""
    code, found = node.astext(), []
    while node.parent is not None:
        node = node.parent
        if isinstance(node, addnodes.desc):
            names = {name.astext() for name in node[0].findall(addnodes.desc_sig_name)}
            if code in names:
                return []
            if node["objtype"] in ("class", "exception"):
                found.append(f"{node[0]['module']}.{node[0]['fullname']}")
    return found


def entry_of(name: str, entries: dict) -> str | None:
    """The entry that tells of a name: its own, its alias's, or its owner's."""
    if name in entries:
        return name
    value = value_of(name)
    if value is None:
        return None
    same = next((each for each in entries if value_of(each) is value), None)
    owner = name.rpartition(".")[0]
    return same or (None if owner == "jaxstrategy" else entry_of(owner, entries))


@functools.cache
def value_of(name: str) -> object | None:
    """What stands under a full name; None where nothing does."""
    owner, _, member = name.rpartition(".")
    if not owner or member.startswith("_"):
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        pass
    try:
        return getattr(value_of(owner) or importlib.import_module(owner), member, None)
    except (ImportError, AttributeError):
        return None


def is_link(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | nodes.title):
            return True
    return False
