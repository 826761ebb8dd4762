"""`ReplicaContext`: what one replica sees, and its collectives."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final, overload

import jax
import jax.numpy as jnp

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy, Context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import CommunicationOptions, ReduceOp, checked_options
from jaxstrategy._src.reductions.compression import (
    CompressionState,
    checked_debts,
    compression_of,
    state_of,
)
from jaxstrategy._src.reductions.operations import checked_groups
from jaxstrategy._src.reductions.reduction import HowReduced
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text import shown
from jaxstrategy._src.values import arrays, per_replica, trees
from jaxstrategy._src.values.arrays import Leaf, Number, PyTree, TreeT
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import is_slices


def check_arguments(args: object, kwargs: object) -> None:
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"`args` was a {type(args).__name__}; a tuple of the function's arguments "
            "was wanted. Write `args=(x,)` for one argument."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(
            f"`kwargs` was a {type(kwargs).__name__}; a dict of the function's keyword "
            "arguments was wanted."
        )


class StrategyAdapter(abc.ABC):
    """An object with other methods over a strategy, which alone contexts know."""

    @property
    @abc.abstractmethod
    def core(self) -> AbstractStrategy:
        """The strategy."""


AnyStrategy: TypeAlias = AbstractStrategy | StrategyAdapter
"""A strategy, or an adapter of one, which means the same."""


def core_of(strategy: object) -> object:
    """The strategy of an adapter; anything else as it is."""
    return strategy.core if isinstance(strategy, StrategyAdapter) else strategy


def checked_core(strategy: object) -> AbstractStrategy:
    core = core_of(strategy)
    if not isinstance(core, AbstractStrategy):
        raise TypeError(f"`strategy` was {shown(strategy)}; a strategy was wanted.")
    return core


# The name scope of a `merge_call`, by which the analysis of a step finds it.
MERGE_SCOPE = "jaxstrategy.merge_call"
# In a `merge_call` the name scope of replica code: `run` and `extended.update`.
REPLICA_SCOPE = "jaxstrategy.each_replica"


@final
class ReplicaContext:
    """One replica's view, inside `run`; `get_replica_context()` returns it.

    Outside any strategy there is a replica context too, of a single replica, so that
    library code written with it works with no strategy at all.

    Raises:
      TypeError: it is made of something else than a strategy.

    >>> import jaxstrategy as js
    >>> js.get_replica_context().all_reduce("sum", 3.0)
    Array(3., dtype=float32, weak_type=True)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> def step(x):
    ...     return js.get_replica_context().all_reduce("sum", x)
    >>> strategy.run(step, (strategy.per_replica([1.0, 2.0, 3.0, 4.0]),))
    Array(10., dtype=float32)
    """

    def __init__(self, strategy: AnyStrategy) -> None:
        self._strategy = checked_core(strategy)
        self._is_outside = not self._strategy._replicas.axes

    @property
    def strategy(self) -> AbstractStrategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take this step together.

        Raises:
          ContextError: this is the context of no strategy, and used in a step.
        """
        self._require_no_other_step("num_replicas_in_sync")
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The id of this replica, from 0.

        Inside `run` one program serves all replicas, so this is an int32 scalar known
        only on the devices: select with `jnp.where`, `jax.lax.cond` or `jnp.take`, not
        with a Python `if`. In `eager_replicas()` its value is known, and an `if` works.
        Outside a strategy it is the int 0.

        Raises:
          ContextError: this is not the current replica context.
        """
        self._require_current("replica_id_in_sync_group")
        return _context.replica_index(self._strategy)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all replicas, in replica order; one program serves them.

        Raises:
          ContextError: this is the context of no strategy, and used in a step.
        """
        self._require_no_other_step("devices")
        return self._strategy.devices

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Number,
        options: CommunicationOptions | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> jax.Array: ...
    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: TreeT,
        options: CommunicationOptions | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> TreeT: ...
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> PyTree:
        """`value` reduced over all replicas, leaf by leaf; all get the result.

        Small arrays are joined before they are reduced, which is faster; the sums are
        those of the arrays one by one, up to the order in which replicas are added.
        `IndexedSlices` stay sparse: their rows are joined.

        Gradients are local: the gradient of `all_reduce(op, x)` with respect to this
        replica's `x` is `all_reduce(op)` of the replicas' incoming gradients, for SUM
        and MEAN. A minimum or maximum passes their sum to the replicas that hold it.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value: a pytree of arrays and numbers, of the same shapes on all replicas.
          options: how, instead of as the strategy does.
          groups: replica ids in groups of one size; each replica then gets its group's
            result, which may differ from another's.

        Returns:
          A pytree like `value`, of the same shapes. SUM, MIN and MAX keep each dtype,
          MEAN of integers has JAX's default float dtype. Sums of 8- and 16-bit integers
          wrap as NumPy's do.

        Raises:
          ValueError: `reduce_op` is not a reduction; `value` is None; `groups` do not
            hold each replica once; MIN or MAX of `IndexedSlices`.
          TypeError: a leaf is not a number or has no such reduction (bool sums).
          ContextError: this is not the current replica context.
        """
        self._require_current("all_reduce")
        op = ReduceOp(reduce_op)
        if value is None:
            raise ValueError("`all_reduce` was given None; there is nothing to reduce.")
        checked_options(options)
        within = None
        if groups is not None:
            within = checked_groups(groups, self.num_replicas_in_sync)
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_whole)
        _check_local(leaves)
        how = HowReduced(op, options, within)
        results = self._strategy._reduction.reduce_leaves(how, leaves)
        return jax.tree.unflatten(treedef, results)

    def all_reduce_compressed(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        state: CompressionState,
        options: CommunicationOptions,
    ) -> tuple[PyTree, CompressionState]:
        """`value` reduced over all replicas, compressed before it is sent.

        What is not sent is kept in the state, and added to the value of the next call
        (*error feedback*, arXiv:1901.09847), so that over many steps all arrives.
        Compressed are arrays of real floating-point numbers that are large enough, see
        `CommunicationOptions.compression`; for others `state` holds None. An array with
        a NaN or an infinity on some replica arrives with NaN (with 'int8' the 256
        numbers around it), and the state keeps what it had. There is no gradient.

        Args:
          reduce_op: "mean" or "sum", or the `ReduceOp`.
          value: a pytree of arrays and numbers, of the same shapes on all replicas.
          state: what `strategy.compression_state` or the last call returned.
          options: with a `compression`.

        Returns:
          A pytree like `value`, equal on all, and the next state.

        Raises:
          ValueError: MIN or MAX; `options` without compression; a `state` of another
            tree; the strategy's cross-device operations add up whole arrays.
          TypeError: `state` is none; a leaf has no such reduction.
          NotImplementedError: the result is differentiated.
          ContextError: this is not the current replica context.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> options = js.experimental.CommunicationOptions(compression="int8")
        >>> def step(*grads_and_state):
        ...     context = js.get_replica_context()
        ...     return context.all_reduce_compressed("mean", *grads_and_state, options)
        >>> grads = strategy.per_replica(np.linspace(0, 1, 4000).reshape(4, 1000))
        >>> state = strategy.compression_state(np.zeros(1000, np.float32), options)
        >>> mean, state = strategy.run(step, (grads, state))
        >>> print(state.errors)
        PerReplica(float32[1000] on cpu:0..3)
        """
        self._require_current("all_reduce_compressed")
        checked_options(options, with_compression=True)
        paths, treedef = jax.tree.flatten_with_path(value, is_leaf=_is_whole)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        _check_local(leaves)
        owed = checked_debts(state, leaves, names, treedef, compression_of(options))
        how = HowReduced(ReduceOp(reduce_op), options)
        reduction = self._strategy._reduction
        results, debts = reduction.reduce_compressed(how, leaves, owed)
        return treedef.unflatten(results), state_of(debts, treedef)

    def all_gather(
        self, value: PyTree, axis: int, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Every replica's `value`, joined along `axis` in replica order, on all.

        Shapes: `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`; leaf by leaf. The
        gradient with respect to this replica's part is the sum over replicas of the
        incoming gradients for that part.

        Args:
          value: a pytree of arrays and numbers, of the same shapes on all replicas.
          axis: the dimension along which the versions are joined.
          options: as in TensorFlow. An all-gather adds no numbers and has one
            implementation, so nothing in them changes it.

        Raises:
          TypeError: `options` are no `CommunicationOptions`.
          ValueError: a leaf is a scalar, or `axis` is out of range for one.
          ContextError: this is not the current replica context.
        """
        self._require_current("all_gather")
        checked_options(options)
        reduction = self._strategy._reduction

        def gathered(leaf: Leaf) -> Leaf:
            _check_local([leaf])
            return reduction.gathered(leaf, axis)

        return trees.map_leaves(gathered, value)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Steps across to all replicas: calls `merge_fn(strategy, *args, **kwargs)`.

        Arrays in the arguments arrive as `PerReplica`, with one replica as they are;
        numbers, strings and other plain values, which are equal on all replicas, always
        arrive as they are. `merge_fn`
        is in cross-replica context and may use `strategy.reduce`, `strategy.gather`,
        `strategy.run` and `strategy.extended`. It is called once for all replicas,
        within the same program.

        Returns:
          What `merge_fn` returned, each `PerReplica` as this replica's version.
          Variables, and whatever else is no array, come back as they are.

        Shapes: an array `[...]` arrives as a `PerReplica` of versions `[...]`, and
        comes back as an array `[...]`.

        Raises:
          ContextError: this is not the current replica context.
          TypeError: `merge_fn` cannot be called, or `args` is no tuple or list.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> def total(strategy, x):
        ...     return strategy.reduce("sum", x)
        >>> def step(x):
        ...     return js.get_replica_context().merge_call(total, (x,))
        >>> strategy.run(step, (strategy.per_replica([1.0, 2.0, 3.0, 4.0]),))
        Array(10., dtype=float32)
        """
        self._require_current("merge_call")
        if not callable(merge_fn):
            raise TypeError(
                f"`merge_call` was given {merge_fn!r}, which cannot be called. Give a "
                "function that takes the strategy and the arguments."
            )
        check_arguments(args, None if isinstance(kwargs, Mapping) else kwargs)
        if (eager := _context.current().eager) is not None:
            return eager.merge_call(merge_fn, args, kwargs or {})
        across = self.to_cross(tuple(args))
        named = self.to_cross(dict(kwargs or {}))
        in_step = _context.current().in_step  # there is none outside any strategy
        entered = _context.entered(strategy=self._strategy, replica=None)
        with entered, jax.named_scope(MERGE_SCOPE):
            result = merge_fn(self._strategy, *across, **named)
        return to_replica(result) if in_step else result

    def fold_in(self, key: jax.Array) -> jax.Array:
        """A random key that differs on every replica, made from one that does not.

        Both are scalars (or both raw keys, `[2]`).

        It is `jax.random.fold_in(key, replica_id)`: the same `key` gives the same keys
        on the replicas each time, and N replicas draw N different dropout masks.

        Raises:
          ContextError: this is not the current replica context.
        """
        self._require_current("fold_in")
        return jax.random.fold_in(key, self.replica_id_in_sync_group)

    def to_cross(self, tree: PyTree) -> PyTree:
        """This replica's arrays as `PerReplica`s; everything else as it is.

        With one replica all is as it is.
        """
        if self._is_outside:
            return tree
        replicas = self._strategy._replicas
        is_alone = replicas.count == 1

        def wrap(leaf: Leaf) -> Leaf:
            if isinstance(leaf, PerReplica):  # captured from outside the step
                leaf._misused()
            if arrays.is_array(leaf) and not is_alone:
                return per_replica.from_local(jnp.asarray(leaf), replicas)
            return leaf

        return trees.map_around_objects(wrap, tree)

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy!r})"

    def _require_current(self, method: str) -> None:
        context = _context.current()
        if context.replica is self or (context.strategy is None and self._is_outside):
            return
        raise self._mismatch(method, context)

    def _require_no_other_step(self, method: str) -> None:
        # The number of replicas of the default strategy, 1, would be silently wrong.
        context = _context.current()
        if context.in_step and context.strategy is not self._strategy:
            raise self._mismatch(method, context)

    def _mismatch(self, method: str, context: Context) -> ContextError:
        if self._is_outside:
            advice = (
                "This one was taken outside `run`, where there is one replica: call "
                "`get_replica_context()` inside the step"
            )
        elif not context.in_step:
            advice = (
                "This one was taken inside a step, and is valid only there: return "
                "what you need from the step, or use a method of the strategy here"
            )
        elif context.replica is None:
            advice = (
                "In `merge_call` there are all replicas: use the strategy, as in "
                "`strategy.reduce(op, value)`"
            )
        else:
            advice = (
                "This one belongs to another step, or to an earlier trace of this one: "
                "call `get_replica_context()` where it is used"
            )
        return ContextError(
            f"Mismatching contexts: `{method}` was called on a replica context of "
            f"{self._strategy!r}, but the current one is "
            f"{_context.describe(context)}. {advice}."
        )


def _check_local(leaves: Sequence[Leaf]) -> None:
    """Raise if a leaf is a `PerReplica`, captured from outside the step."""
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            leaf._misused()


def to_replica(tree: PyTree, *, read_variables: bool = False) -> PyTree:
    """`tree` with this replica's versions, while a step is traced."""

    def unwrap(leaf: Leaf) -> Leaf:
        if read_variables and isinstance(leaf, Handle):
            leaf = leaf.distributed()
        return per_replica.local_value(leaf) if isinstance(leaf, PerReplica) else leaf

    return trees.map_around_objects(unwrap, tree)


def _is_whole(node: object) -> bool:
    return isinstance(node, PerReplica) or is_slices(node)
