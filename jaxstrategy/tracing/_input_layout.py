"""The form in which a jitted function takes the arguments of a step: `InputLayout`.

JAX takes pytrees apart in C++, as fast as it takes a list of arrays. So a program is
called with the user's own trees, and a call of a step costs little more than one of
JAX's. Where arguments are static or donated, it takes the list of leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import final

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxstrategy.tracing._roles import Role, Signature
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree, TreeStructure


@final
class InputLayout:
    """The form in which one jitted function takes the arguments of its step.

    Args:
      signature: of the arguments.
      donated: the leaves that are donated. JAX donates all of an argument or nothing;
        a mask stays.
      is_flat: whether it takes the leaves in any case.

    Attributes:
      structure: of `(args, kwargs)` as the user gave them, if the jitted function takes
        them so, the keyword arguments as a last dict if there are any. None if it takes
        the leaves.
      divided: the arguments of the jitted function with some `PerReplica`: the place of
        each, its structure, and of each `PerReplica` the places among its leaves and
        among all.
    """

    def __init__(
        self, signature: Signature, donated: Collection[int], is_flat: bool = False
    ) -> None:
        count = len(signature.dynamic)
        self.structure = None if donated or is_flat else _structure_of(signature)
        self._places = [[index] for index in range(count)]
        self.has_keywords = False
        if self.structure is not None:
            args, kwargs = jax.tree.unflatten(self.structure, range(count))
            self.has_keywords = bool(kwargs)
            # For each argument of the jitted function its leaves.
            self._places = [jax.tree.leaves(each) for each in as_inputs(args, kwargs)]
        inputs = self.inputs(range(count))
        self._expected = jax.tree.structure(tuple(inputs))
        roles = [role for role in signature.roles if role is not Role.STATIC]
        self.divided: list[tuple[int, TreeStructure, list[tuple[int, int]]]] = []
        for place, own in enumerate(self._places):
            divided = [
                (among_own, index)
                for among_own, index in enumerate(own)
                if roles[index] is Role.PER_REPLICA
            ]
            if divided:
                structure = jax.tree.structure(inputs[place])
                self.divided.append((place, structure, divided))

    @property
    def count(self) -> int:
        """The number of arguments of the jitted function."""
        return len(self._places)

    def inputs(self, leaves: Sequence[Leaf]) -> Sequence[PyTree]:
        """The arguments of the jitted function that have these leaves."""
        if self.structure is None:
            return tuple(leaves)
        return as_inputs(*jax.tree.unflatten(self.structure, leaves))

    def leaves(self, inputs: Sequence[PyTree]) -> list[Tracer] | None:
        """The leaves of what JAX gives the jitted function.

        None if it is put together otherwise than the arguments of the step are.
        """
        leaves, structure = jax.tree.flatten(tuple(inputs))
        return leaves if structure == self._expected else None

    def shardings(self, shardings: Sequence[NamedSharding]) -> Sequence[PyTree]:
        """The shardings for `jax.jit`.

        Args:
          shardings: of each leaf.
        """
        owned = [[shardings[index] for index in own] for own in self._places]
        if all(len(set(own)) == 1 for own in owned):
            # A class of the user may refuse what is no array.
            return tuple(own[0] for own in owned)
        return self.inputs(shardings)


def as_inputs(args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Sequence[PyTree]:
    """The arguments of a jitted function that takes them as the user gave them."""
    return (*args, kwargs) if kwargs else args


def _structure_of(signature: Signature) -> TreeStructure | None:
    """The structure of the arguments; None if they cannot be passed as they are."""
    if signature.kept:
        return None
    following = iter(range(len(signature.roles)))
    nodes: list[Leaf] = []
    for role in signature.roles:
        if role is Role.MASK:
            nodes[-1] = dataclasses.replace(nodes[-1], _mask=next(following))
        else:
            place = next(following)
            is_own = role is Role.PER_REPLICA
            nodes.append(PerReplica(place) if is_own else place)
    try:
        tree = jax.tree.unflatten(signature.treedef, nodes)
        leaves, structure = jax.tree.flatten(tree)
        again = jax.tree.structure(jax.tree.unflatten(structure, leaves))
    except Exception:  # whatever a class of the user raises for what is no array
        return None
    is_same = leaves == list(range(len(signature.roles))) and again == structure
    return structure if is_same else None
