"""Replicas that step by themselves, and an optimizer of what they have in common."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxstrategy._src.communication_options import CommunicationOptions, checked_options
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.text.shown import whole
from jaxstrategy._src.training.optax import check_transformation, optax_for
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import is_per_replica

if TYPE_CHECKING:
    from optax import GradientTransformation, GradientTransformationExtraArgs


class OuterState(NamedTuple):
    """The state of `jaxstrategy.optax.outer`.

    Attributes:
      steps: how many steps were taken since the replicas synchronized, a scalar.
      params: the parameters that all had then: equal on all of them, and so plain
        arrays at any time. Evaluate and export these.
      inner_state: of the inner optimizer, each replica's own.
      outer_state: of the outer optimizer, equal on all replicas.

    >>> import optax
    >>> import jaxstrategy as js
    >>> state = js.optax.outer(optax.sgd(0.1), every=4).init({"w": np.zeros(2)})
    >>> isinstance(state, js.optax.OuterState), int(state.steps)
    (True, 0)
    """

    steps: jax.Array
    params: PyTree
    inner_state: PyTree
    outer_state: PyTree


def outer(
    inner: GradientTransformation,
    outer: GradientTransformation | None = None,
    *,
    every: int,
    options: CommunicationOptions | None = None,
) -> GradientTransformationExtraArgs:
    """An optimizer with which replicas synchronize after `every` steps of their own.

    Each replica takes steps of `inner` with its own gradients, which are *not* reduced,
    so that its parameters `w_r` become its own. After `every` steps they synchronize:
    from the parameters `w` that all had the last time, `outer` takes one step, and
    takes for the gradient how far the replicas came, in the mean:

        gradient = mean over the replicas of (w - w_r)

    All go on with the result. So the parameters are sent once in `every` steps. With
    `optax.sgd(1.0)`, the default, the result is the mean of the replicas' parameters:
    local SGD (Stich 2018, arXiv:1805.09767). DiLoCo (Douillard et al. 2023,
    arXiv:2311.08105) has AdamW inside, `optax.sgd(0.7, momentum=0.9, nesterov=True)`
    outside, and synchronizes after 500 steps.

    In between the parameters, and at any time the state of `inner`, are `PerReplica`s.
    Begin with such a state, which `own_copies` makes, and the step needs no further
    word; of a state that begins the same on all replicas, say
    `RunOptions(expect_mirrored=False)`. `OuterState.params` is plain at any time: give
    `assert_in_sync` that, not the whole state. Where state cannot be a `PerReplica`, as
    in objects of Flax NNX, use `strategy.local_steps`.

    Let it be the outermost transformation. With one replica, and outside any strategy,
    it does the same with one replica's parameters.

    Args:
      inner: each replica's own optimizer.
      outer: that of what they have in common.
      every: how many steps a replica takes by itself; 1 synchronizes at each.
      options: how the parameters are reduced, instead of as the strategy does.

    Returns:
      A transformation with an `OuterState`, which holds the parameters of the last
      synchronization, and what `outer` keeps. After it the replicas' parameters are
      those: exactly where none changed by more than half, elsewhere up to the rounding
      of `old + (new - old)`. Updates of 16-bit parameters are float32.

    Raises:
      ValueError: `every` is less than 1. In `update`: there are no parameters.
      TypeError: something else than a transformation, or a whole number; in `init`: a
        parameter is not a floating-point number, or a `PerReplica`.
      ContextError: in `update`, in cross-replica context.
      MissingExtraError: Optax is not installed.

    >>> import jax, optax
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> tx = js.optax.outer(optax.sgd(0.5), every=2)
    >>> @strategy.run
    ... def step(w, state, goal):
    ...     grad = jax.grad(lambda w: (w - goal) ** 2 / 2)(w)  # each replica's own
    ...     updates, state = tx.update(grad, state, w)
    ...     return optax.apply_updates(w, updates), state
    >>> w, state = js.optax.own_copies((0.0, tx.init(0.0)), strategy=strategy)
    >>> goals = strategy.per_replica([4.0, 8.0])
    >>> w, state = step(w, state, goals)
    >>> w.values, state.params
    ((Array(2., dtype=float32), Array(4., dtype=float32)), Array(0., dtype=float32))
    >>> w, state = step(w, state, goals)  # to 3 and 6, and synchronize
    >>> w.values, state.params
    ((Array(4.5, dtype=float32), Array(4.5, dtype=float32)), Array(4.5, dtype=float32))
    """
    optax = optax_for("outer")
    check_transformation("inner", inner)
    if outer is not None:
        check_transformation("outer", outer)
    checked_options(options)
    inner = optax.with_extra_args_support(inner)
    outer_step = _OuterStep(outer or optax.sgd(1.0), options)
    every = _checked_steps(every)

    def init(params: PyTree) -> OuterState:
        _check_params(params)
        inner_state, outer_state = inner.init(params), outer_step.outer.init(params)
        own = jax.tree.map(_copy, params)
        return OuterState(jnp.zeros([], jnp.int32), own, inner_state, outer_state)

    def update(
        updates: PyTree, state: OuterState, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, OuterState]:
        if params is None:
            raise ValueError(
                "`outer` was not given the parameters, which it brings together. Call "
                "`tx.update(grads, state, params)`."
            )
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra)
        updates = jax.tree.map(_wide_update, params, updates)
        steps = state.steps + 1

        def synchronize() -> tuple[PyTree, PyTree, PyTree]:
            return outer_step.after(updates, state, params)

        def go_on() -> tuple[PyTree, PyTree, PyTree]:
            return updates, state.params, state.outer_state

        if every == 1:
            found = synchronize()
        else:
            found = jax.lax.cond(steps == every, synchronize, go_on)
        updates, together, outer_state = found
        return updates, OuterState(steps % every, together, inner_state, outer_state)

    return optax.GradientTransformationExtraArgs(init, update)


@final
@dataclasses.dataclass(frozen=True)
class _OuterStep:
    """A step of the outer optimizer."""

    outer: GradientTransformation
    options: CommunicationOptions | None

    def after(
        self, updates: PyTree, state: OuterState, params: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Instead of `updates` those that make the parameters equal on all replicas."""
        optax = optax_for("outer")
        ends = optax.apply_updates(params, updates)
        ways = jax.tree.map(lambda start, end: start - end, state.params, ends)
        mean = _replica().all_reduce("mean", ways, options=self.options)
        step, outer_state = self.outer.update(mean, state.outer_state, state.params)
        new = optax.apply_updates(state.params, step)
        return jax.tree.map(_way, params, new), new, outer_state


def _copy(param: Leaf) -> jax.Array:
    """`param` as an array of its own: both may be donated."""
    return jnp.array(param, jnp.asarray(param).dtype, copy=True)


def _replica() -> ReplicaContext:
    replica = get_replica_context()
    if replica is None:
        raise ContextError(
            "`outer` was used in cross-replica context, where the parameters of all "
            "replicas are one `PerReplica`. Each replica updates its own: call "
            "`tx.update` in the step, outside of `merge_call` and `scope()`."
        )
    return replica


def _wide(dtype: DTypeLike) -> DTypeLike:
    """What an update is computed in: in 16 bits `old + (new - old)` is not `new`."""
    return jnp.promote_types(dtype, jnp.float32)


def _wide_update(param: Leaf, update: Leaf | None) -> jax.Array:
    wide = _wide(jnp.asarray(param).dtype)
    # Optax's own sign of a parameter that stays.
    if update is None:
        return jnp.zeros(jnp.shape(param), wide)
    return jnp.asarray(update, wide)


def _way(old: Leaf, new: jax.Array) -> jax.Array:
    wide = _wide(new.dtype)
    return new.astype(wide) - jnp.asarray(old, wide)


def _checked_steps(every: object) -> int:
    number = whole(every)
    if number is None:
        raise TypeError(
            f"`every` was {every!r}; the number of steps that a replica takes by "
            "itself was wanted, a whole number."
        )
    if number < 1:
        raise ValueError(
            f"`every` was {number}; a replica takes at least one step by itself."
        )
    return number


def _check_params(params: PyTree) -> None:
    found, _ = jax.tree.flatten_with_path(params, is_leaf=is_per_replica)
    for path, leaf in found:
        where = f"`params{jax.tree_util.keystr(path)}`"
        if is_per_replica(leaf):
            raise TypeError(
                f"{where} is a PerReplica, but the replicas of `outer` begin with the "
                "same parameters. Give `init` those of `OuterState.params`, or reduce "
                'them: `strategy.reduce("mean", params)`.'
            )
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact):
            raise TypeError(
                f"{where} is {jnp.asarray(leaf).dtype}, which has no mean of the same "
                "kind. Keep what is no floating-point number out of the parameters, "
                "or leave it to `optax.masked(jaxstrategy.optax.outer(...), mask)`."
            )
