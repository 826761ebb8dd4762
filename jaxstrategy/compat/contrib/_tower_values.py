"""Values as the methods of 2018 take and return them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.core import Tracer

from jaxstrategy._errors import ContextError
from jaxstrategy._options import VariableSynchronization
from jaxstrategy.contexts import _context
from jaxstrategy.strategies import _current
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.text._shown import shown
from jaxstrategy.values import _trees
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables._variable import Variable


def require_function(method: str, fn: object) -> None:
    """Raise unless this can be called.

    Raises:
      TypeError: it cannot.
    """
    if not callable(fn):
        raise TypeError(
            f"`{method}` was given {shown(fn)}, which cannot be called. Its arguments "
            f"follow the function: `{method}(..., fn, *args, **kwargs)`."
        )


def require_equal(method: str, arguments: PyTree) -> None:
    """Raise if an argument differs between towers, outside of steps.

    In a step each array is a `PerDevice`, and it is proved what is equal.

    Raises:
      TypeError: one does.
    """
    if _context.current().in_step:
        return
    leaves = jax.tree.leaves(arguments, is_leaf=_trees.is_whole)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise TypeError(
            f"`{method}` was given a PerDevice, which differs between towers, so that "
            "the copies would differ. Reduce it first: "
            "`distribution_strategy.reduce(aggregation, value, destinations=var)`."
        )


def numbers_of_towers(strategy: Strategy) -> PerReplica | int:
    """A value that is 0, 1, ... on the replicas; the int 0 on a single one."""
    if strategy.num_replicas_in_sync == 1:
        return 0
    return strategy.run(_own_number)


def _own_number() -> jax.Array | int:
    return _current.get_replica_context().replica_id_in_sync_group


def is_on_one_device(value: object) -> bool:
    """Whether it is a single array with one copy."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    return len(value.sharding.device_set) == 1


def grouped(values: Sequence[PyTree], name: str | None) -> PyTree:
    """None when all is computed; a single leaf itself, if it has no name."""
    leaves = jax.tree.leaves(list(values))
    jax.block_until_ready([leaf for leaf in leaves if not isinstance(leaf, Tracer)])
    return leaves[0] if len(leaves) == 1 and name is None else None


def read_variable(v: Variable) -> jax.Array:
    """The value that the copies of a variable have together.

    Raises:
      ContextError: it has a copy for each tower, and code is in one.
      TypeError: it is no variable.
    """
    if not isinstance(v, Variable):
        raise TypeError(
            f"`read_var` was given {shown(v)}; a jaxstrategy.Variable was wanted."
        )
    in_tower = _context.current().replica is not None
    if in_tower and v.synchronization is VariableSynchronization.ON_READ:
        raise ContextError(
            f"`read_var` was given the tower-local variable {v.name!r} in a tower, "
            "where it has a value of its own: `v.value()`. The value of all towers is "
            "known in cross-tower context only."
        )
    return v.value()
