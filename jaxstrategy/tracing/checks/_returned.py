"""Results of a step that come back as its arguments.

A step that was given an array equal on all replicas, and is then given what it made of
it, different on each, has lost a reduction on the way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import jax

from jaxstrategy._errors import NotMirroredWarning
from jaxstrategy.text import _user_code
from jaxstrategy.tracing._roles import (
    Role,
    Signature,
)
from jaxstrategy.tracing.checks._varying_results import SHOULD_BE_REDUCED, Unstated
from jaxstrategy.values import _per_replica, _trees
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Function, Leaf, PyTree


class Returned:
    """Varying results that the programs of one function returned when they were new.

    It keeps no array alive.
    """

    def __init__(self) -> None:
        self._signatures: list[Signature] = []
        self._results: dict[int, tuple[weakref.ref[jax.Array], Unstated]] = {}
        self._is_told = False

    def add(
        self, signature: Signature, results: PyTree, unstated: dict[int, Unstated]
    ) -> None:
        """Take note of what a new program returned.

        Args:
          signature: of its arguments.
          results: they.
          unstated: those that may differ and of which nobody has said so.
        """
        self._signatures.append(signature)
        if self._is_told or not unstated:
            return
        leaves = jax.tree.leaves(results, is_leaf=_trees.is_whole)
        for position, each in unstated.items():
            leaf = leaves[position]
            if isinstance(leaf, PerReplica):
                array = _per_replica.contents(leaf)
                self._results[id(array)] = weakref.ref(array), each

    def check(self, signature: Signature, leaves: Sequence[Leaf], fn: Function) -> None:
        """Warn, once, if an argument is such a result and was mirrored before.

        Args:
          signature: of arguments that there is no program for yet.
          leaves: they.
          fn: the step.
        """
        if not self._results:
            return
        before = [s for s in self._signatures if s.treedef == signature.treedef]
        for index, array in zip(signature.dynamic, leaves, strict=True):
            known = self._results.get(id(array))
            # An array that is gone may have left its id to another one.
            if known is None or known[0]() is not array:
                continue
            leaf = signature.leaves.index(index)
            if any(s.roles[s.leaves[leaf]] is Role.SAME for s in before):
                self._warn(signature.label(fn, index), known[1], fn)
                return

    def _warn(self, argument: str, result: Unstated, fn: Function) -> None:
        self._is_told, self._results = True, {}
        name = getattr(fn, "__name__", type(fn).__name__)
        _user_code.warn(
            f"{argument}, an argument of `{name}`, was equal on all replicas at an "
            f"earlier call and differs between them now: it is {result.path}, which "
            "that call returned.\n"
            f"  it varies since: {result.why}\n"
            f"Each replica goes on with its own. {SHOULD_BE_REDUCED}",
            NotMirroredWarning,
        )
