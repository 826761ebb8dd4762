"""An optimizer of Optax whose state is on the parameter servers: `ServerOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.values.types import PyTree, TreeStructure, Value
from jaxstrategy._src.variables.kinds.server_kind import server_kind_of
from jaxstrategy._src.variables.server_updates import update_together
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

if TYPE_CHECKING:
    from optax import GradientTransformation

_Update = Callable[..., Sequence[jax.Array]]


@final
class ServerOptimizer:
    """Updates variables on their servers, with a transformation of Optax.

    Only gradients travel. A server changes a variable and what the optimizer keeps of
    it together, so that no update of another worker is lost. Each variable, or shard of
    one, has a state of its own: transformations that need all gradients at once, such
    as `optax.clip_by_global_norm`, belong into the function, before `apply`.

    Gradients that are `IndexedSlices` update their rows only, and only their rows of
    the state ("lazy": a row that is not used is not decayed); rows that are there more
    than once are added up.

    Made by `strategy.optimizer(tx, variables)`.

    Args:
      strategy: the strategy.
      tx: the transformation.
      variables: a pytree of variables of the strategy.

    Attributes:
      slots: what it keeps of each variable, as variables beside it, in the order of
        `variables`; `js.checkpoint` saves them like others.

    Raises:
      TypeError: a leaf is no variable.
      ValueError: a variable is not on a parameter server of the strategy.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        tx: GradientTransformation,
        variables: PyTree,
    ) -> None:
        _check_transformation(tx)
        leaves, self._treedef = jax.tree.flatten(variables, is_leaf=_is_variable)
        self._targets = [
            _Target(strategy, tx, leaf) for leaf in map(_checked(strategy), leaves)
        ]
        self.slots = [target.slots for target in self._targets]

    def apply(self, gradients: PyTree) -> None:
        """Updates all variables; in a function when it has ended, outside at once.

        Args:
          gradients: a pytree like the variables: of arrays, or of `IndexedSlices`.

        Raises:
          ValueError: another structure, or shapes that the variables have not.
        """
        leaves = _flattened_as(self._treedef, gradients)
        for target, gradient in zip(self._targets, leaves, strict=True):
            target.apply(gradient)


@final
class _Target:
    """One variable, or the shards of one, and what is kept of each."""

    def __init__(
        self,
        strategy: AbstractStrategy,
        tx: GradientTransformation,
        variable: Variable | ShardedVariable,
    ) -> None:
        self._variable = variable
        self._tx: Any = tx
        self._shards = _shards(variable)
        self._starts = _starts(self._shards)
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self._shards]
        states = [jax.eval_shape(self._tx.init, of_type) for of_type in types]
        self._structure = jax.tree.structure(states[0])
        self._has_rows = [
            leaf.shape == types[0].shape for leaf in jax.tree.leaves(states[0])
        ]
        self.slots = [
            _slots(strategy, self._tx, shard, self._structure) for shard in self._shards
        ]

    def apply(self, gradient: Value) -> None:
        """Updates it."""
        shape = tuple(self._variable.shape)
        if is_slices(gradient):
            self._apply_rows(gradient)
            return
        gradient = jnp.asarray(gradient)
        if gradient.shape != shape:
            raise ValueError(
                f"The gradient of variable {self._variable.name!r} has shape "
                f"{gradient.shape}; {shape} was wanted."
            )
        for shard, slots, start in zip(
            self._shards, self.slots, self._starts, strict=True
        ):
            own = gradient
            if len(self._shards) > 1:
                own = gradient[start : start + shard.shape[0]]
            update_together([shard, *slots], self._dense(), [own])

    def _dense(self) -> _Update:
        def update(value: jax.Array, *given: jax.Array) -> list[jax.Array]:
            *held, gradient = given
            state = jax.tree.unflatten(self._structure, held)
            changes, state = self._tx.update(gradient, state, value)
            new = (value + changes).astype(value.dtype)
            return [new, *jax.tree.leaves(state)]

        return update

    def _apply_rows(self, rows: IndexedSlices) -> None:
        ids = jnp.asarray(rows.indices).reshape(-1)
        values = jnp.asarray(rows.values).reshape(-1, *self._variable.shape[1:])
        for shard, slots, start in zip(
            self._shards, self.slots, self._starts, strict=True
        ):
            update_together([shard, *slots], self._of_rows(start), [ids, values])

    def _of_rows(self, start: int) -> _Update:
        def update(value: jax.Array, *given: jax.Array) -> list[jax.Array]:
            *held, ids, gradients = given
            rows, own = _added_up(ids - start, gradients, value.shape[0])
            taken = [
                leaf.at[rows].get(mode="fill", fill_value=0) if by_row else leaf
                for leaf, by_row in zip(held, self._has_rows, strict=True)
            ]
            state = jax.tree.unflatten(self._structure, taken)
            old = value.at[rows].get(mode="fill", fill_value=0)
            changes, state = self._tx.update(own, state, old)
            new = [
                leaf.at[rows].set(part, mode="drop") if by_row else part
                for leaf, part, by_row in zip(
                    held, jax.tree.leaves(state), self._has_rows, strict=True
                )
            ]
            changed = (old + changes).astype(value.dtype)
            return [value.at[rows].set(changed, mode="drop"), *new]

        return update


def _added_up(
    ids: jax.Array, values: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Each row once with the sum of its values; beyond the length what is no row."""
    ids = jnp.where((ids >= 0) & (ids < length), ids, length)
    rows, places = jnp.unique(
        ids, return_inverse=True, size=ids.size, fill_value=length
    )
    return rows, jax.ops.segment_sum(values, places.reshape(-1), ids.size)


def _slots(
    strategy: AbstractStrategy, tx: Any, shard: Variable, structure: TreeStructure
) -> list[Variable]:
    """What an optimizer keeps of one shard, beside it."""
    state = tx.init(shard.value())
    extended: Any = getattr(strategy, "extended")  # noqa: B009
    made = []
    for path, leaf in jax.tree.leaves_with_path(state):
        name = f"{shard.name}{jax.tree_util.keystr(path)}"
        with strategy.scope(), extended.colocate_vars_with(shard):
            made.append(Variable(leaf, trainable=False, name=name))
    assert len(made) == structure.num_leaves
    return made


def _shards(variable: Variable | ShardedVariable) -> list[Variable]:
    if isinstance(variable, ShardedVariable):
        return list(variable.variables)
    return [variable]


def _starts(shards: Sequence[Variable]) -> list[int]:
    starts = [0]
    for shard in shards[:-1]:
        starts.append(starts[-1] + shard.shape[0])
    return starts


def _is_variable(node: object) -> bool:
    return isinstance(node, (Handle, ShardedVariable))


def _checked(
    strategy: AbstractStrategy,
) -> Callable[[object], Variable | ShardedVariable]:
    def check(leaf: object) -> Variable | ShardedVariable:
        if not isinstance(leaf, (Variable, ShardedVariable)):
            raise TypeError(
                f"`variables` holds {shown(leaf)}, a {type(leaf).__name__}; variables "
                "were wanted."
            )
        for shard in _shards(leaf):
            if server_kind_of(shard) is None or shard.strategy is not strategy:
                raise ValueError(
                    f"Variable {shard.name!r} is not on a parameter server of "
                    f"{strategy!r}. Make it in the scope of the strategy."
                )
        return leaf

    return check


def _check_transformation(tx: object) -> None:
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"`tx` was {shown(tx)}; a transformation of Optax was wanted: "
            "`optax.adam(1e-3)`."
        )


def _flattened_as(treedef: TreeStructure, gradients: PyTree) -> list[Any]:
    leaves, found = jax.tree.flatten(gradients, is_leaf=is_slices)
    if found != treedef:
        raise ValueError(
            f"`gradients` has the structure {found}; that of the variables, {treedef}, "
            "was wanted."
        )
    return leaves
