"""Functions of whole arrays that can also be computed from parts: `ShardFunction`.

Who calls one gets its result on whole arrays, everywhere. In a trace the call is one
`jit` equation of that name. Whoever knows that an operand lies divided over the
replicas finds the function by the equation (`called_by`) and calls `of_parts` instead,
so that nobody has to have the whole array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import jax

from jaxstrategy.replicas._state_sharding import ArrayLike

# An underscore between words: the name is a symbol in the program that XLA gets.
_PREFIX = "jaxstrategy_"


Result: TypeAlias = jax.Array | tuple[jax.Array, ...]


@final
@dataclasses.dataclass(frozen=True)
class ShardFunction:
    """A function of whole arrays that can also be computed from parts of them.

    A part is a block of dimension 0: replica i has the i-th of equal blocks. `whole`
    uses no collective; `of_parts` is called by all replicas, inside a
    `shard_map(check_vma=False)`, with the operands and `axes=`: the mesh axes over
    which arrays are divided, along which it uses collectives.

    The function must not be differentiated: JAX's own derivative of the equation would
    keep its name. A `jax.custom_jvp` around it has the derivative; a `custom_vmap` in
    between may say what becomes of several calls.

    Attributes:
      name: how its equation is found. Of another definition it must be another name;
        in every process it is the same.
      whole: the definition on whole arrays; of one array, or a tuple of them.
      ranks: the number of dimensions of each operand. An equation with others is not
        this function: `jax.vmap` keeps the name, and adds a dimension.
      of_parts: the same from parts.
      divided: the operands of which `of_parts` takes parts: all of these must lie
        divided along dimension 0. The others it takes whole: each replica's own, which
        may differ between replicas unless `are_rest_equal`.
      returns_divided: the results of which `of_parts` gives this replica's part.
      are_rest_equal: whether the other operands must be equal on all replicas. They
        are of every function that returns parts: parts of one array.
    """

    name: str
    whole: Callable[..., Result]
    ranks: tuple[int, ...]
    of_parts: Callable[..., Result]
    divided: tuple[int, ...]
    returns_divided: tuple[int, ...] = ()

    @property
    def are_rest_equal(self) -> bool:
        """Whether operands that are not divided must be equal on all replicas."""
        return bool(self.returns_divided)

    def __call__(self, *operands: jax.Array) -> Result:
        """The result on whole arrays; in a trace one equation."""
        return self._jitted(*operands)

    @functools.cached_property
    def _jitted(self) -> Callable[..., Result]:
        def marked(*operands: jax.Array) -> Result:
            return self.whole(*operands)

        marked.__name__ = marked.__qualname__ = self.name
        return jax.jit(marked)


_REGISTERED: dict[str, ShardFunction] = {}


def registered(function: ShardFunction) -> ShardFunction:
    """`function`, which `called_by` finds from now on."""
    assert function.name.startswith(_PREFIX), "no function of a user has this name"
    assert function.name not in _REGISTERED, f"two functions are {function.name}"
    _REGISTERED[function.name] = function
    return function


def called_by(
    name: str,
    operands: Sequence[ArrayLike],
    results: Sequence[ArrayLike],
) -> ShardFunction | None:
    """The function that a `jit` equation calls, None if it calls something else.

    Args:
      name: the equation's `name`.
      operands: the types of what it takes.
      results: the types of what it returns.
    """
    found = _REGISTERED.get(name)
    if found is None or tuple(len(each.shape) for each in operands) != found.ranks:
        return None
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    wanted = jax.tree.leaves(jax.eval_shape(found.whole, *types))
    given = [(each.shape, each.dtype) for each in results]
    return found if given == [(each.shape, each.dtype) for each in wanted] else None
