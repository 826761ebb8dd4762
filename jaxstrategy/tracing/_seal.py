"""The end of making programs: what a step compiled ahead of time refuses, `Seal`."""

from __future__ import annotations

from typing import final

import jax

from jaxstrategy._errors import CompiledStepError
from jaxstrategy.text._shown import shown
from jaxstrategy.tracing._replica_step import name_of
from jaxstrategy.tracing._roles import Role, Signature
from jaxstrategy.values._handle import Handle
from jaxstrategy.values._types import Function, Leaf, TreeStructure


@final
class Seal:
    """Says whether a step may have further programs.

    Attributes:
      is_closed: whether it may not.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._signatures: list[Signature] = []

    def add(self, signature: Signature) -> None:
        """Takes note of arguments for which there is a program."""
        self._signatures.append(signature)

    def check_function(self, fn: Function) -> None:
        """Raises if the step refers to other things than when it was compiled.

        Raises:
          CompiledStepError: it does.
        """
        if self.is_closed:
            raise CompiledStepError(
                f"`{name_of(fn)}` was compiled ahead of time, and what it captures has "
                "changed since: a variable of the function around it, or an attribute "
                "of its object. Compile it again, or pass what changes as an argument."
            )

    def check_arguments(self, fn: Function, signature: Signature) -> None:
        """Raises if a step has no program for these arguments, and is to have none.

        Raises:
          CompiledStepError: it has not.
        """
        if not self.is_closed:
            return
        known = self._signatures[-1]
        what = _structures(known, signature) or _roles(fn, known, signature)
        raise CompiledStepError(
            f"`{name_of(fn)}` was compiled ahead of time for other arguments: {what}. "
            "Call it with arguments like those it was compiled for, or compile it for "
            "these."
        )


def _structures(known: Signature, given: Signature) -> str | None:
    if known.treedef == given.treedef:
        return None
    if _paths(known.treedef) == _paths(given.treedef):
        return (
            "their structure holds other static data, such as functions or settings of "
            "a `TrainState`. A model or an optimizer that is made anew is another one: "
            "make it once, outside of the function that builds the state"
        )
    return f"their structure was {shown(known.treedef)}, and is {shown(given.treedef)}"


def _paths(structure: TreeStructure) -> list[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _roles(fn: Function, known: Signature, given: Signature) -> str:
    was, now = _described(known), _described(given)
    for leaf, (old, new) in enumerate(zip(was, now, strict=True)):
        if old != new:
            label = given.label(fn, given.leaves[leaf])
            return f"{label} was {old}, and is {new}"
    return (
        "something static in them, as an argument or an attribute of an object, has "
        "another value, or is equal to what it was and not the same"
    )


def _described(signature: Signature) -> list[str]:
    """For each leaf what it is, in words."""
    statics = dict(signature.with_statics())
    roles = [*signature.roles, Role.SAME]
    return [
        _words(roles[i], roles[i + 1] is Role.MASK, statics.get(i))
        for i in signature.leaves
    ]


def _words(role: Role, has_mask: bool, static: Leaf) -> str:
    if role is Role.STATIC:  # of a variable the `repr` reads its array
        is_handle = isinstance(static, Handle)
        return f"variable {static.name!r}" if is_handle else shown(static)
    if role is Role.SAME:
        return "an array or number, the same on all replicas"
    return f"a PerReplica {'with' if has_mask else 'without'} a mask of its rows"
