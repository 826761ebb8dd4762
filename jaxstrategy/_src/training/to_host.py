"""Values as NumPy arrays: `to_host`."""

from __future__ import annotations

from typing import TypeGuard

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath

from jaxstrategy._src.errors import DonatedValueError, TracedValueError
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.processes import job
from jaxstrategy._src.replicas.inner_axes import local_copy
from jaxstrategy._src.replicas.mesh import as_numbers
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable


def to_host(tree: PyTree) -> PyTree:
    """`tree` with NumPy arrays in place of arrays on devices.

    A mirrored array becomes one array, a `PerReplica` one of shape `[replica, ...]`,
    and a variable its value (an on-read one without aggregation has none, and becomes
    `[replica, ...]`). Random keys become their `jax.random.key_data`. Everything else,
    NumPy arrays, numbers and strings included, stays as it is. All copies are started
    before the first is waited for. The arrays may be read-only.

    With several processes, what each has whole (mirrored arrays) is read locally.
    Anything that is spread over them, such as a `PerReplica` or divided state, is
    gathered one array after the other, and every process gets all of it: then all of
    them must call this, with the same tree.

    Raises:
      TracedValueError: an array is being traced: inside `run` there is no host.
      DonatedValueError: an array was donated to a step.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> js.to_host({"w": strategy.mirror(1.5), "x": strategy.per_replica([3, 4])})
    {'w': array(1.5, dtype=float32), 'x': array([3, 4], dtype=int32)}
    """
    found, structure = jax.tree.flatten_with_path(tree, is_leaf=_is_whole)
    parts = [_readable(leaf, _name(path)) for path, leaf in found]
    for part in parts:
        if isinstance(part, jax.Array):
            part.copy_to_host_async()
    return jax.tree.unflatten(structure, [_read(part) for part in parts])


def _is_whole(node: object) -> bool:
    return trees.is_whole(node) or _is_table(node)


def _is_table(node: object) -> TypeGuard[ShardedVariable]:
    """Whether it is one array, in several variables whose copies have one value."""
    if not isinstance(node, ShardedVariable) or not node.holds_variables:
        return False
    return all(shard._kind.has_one_value for shard in node.variables)


def _name(path: KeyPath) -> str:
    return f"tree{jax.tree_util.keystr(path)}"


def _readable(leaf: Leaf, name: str) -> Leaf:
    """The array that holds the numbers of `leaf`, of this process or of several."""
    if _is_table(leaf):
        return leaf.numpy()
    if isinstance(leaf, Variable):
        has_value = leaf.aggregation is not VariableAggregation.NONE
        leaf = leaf.value() if has_value else leaf.distributed()
    if isinstance(leaf, PerReplica):
        leaf = per_replica.contents(leaf)
    if isinstance(leaf, Tracer):
        raise TracedValueError(
            f"`to_host` was called on `{name}` while a function is traced, where "
            "arrays have no value yet. Return the array from `run`, and call `to_host` "
            "on the result."
        )
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_deleted():
        raise DonatedValueError(
            f"`{name}` was donated to a step, so its memory is gone. Read the state "
            "that the step returned, or call `to_host` before the step."
        )
    return local_copy(as_numbers(leaf))


def _read(part: Leaf) -> Leaf:
    if not isinstance(part, jax.Array):
        return part
    if part.is_fully_addressable:
        return np.asarray(part)
    from jax.experimental import multihost_utils

    with job.exchanging("to_host", part):
        return multihost_utils.process_allgather(part, tiled=True)
