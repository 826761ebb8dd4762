"""Optax chains that reduce gradients: `all_reduce_gradients`, `outer` and others."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.contexts.replica_context import AnyStrategy, ReplicaContext
from jaxstrategy._src.errors import ContextError, MissingExtraError
from jaxstrategy._src.options import (
    CommunicationOptions,
    ReduceOp,
    RunOptions,
    checked_options,
)
from jaxstrategy._src.reductions import compression
from jaxstrategy._src.reductions.compression import CompressionState
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.strategies import cross_replica, strategy as _strategy
from jaxstrategy._src.strategies.current import get_replica_context, get_strategy
from jaxstrategy._src.strategies.strategy import checked_strategy
from jaxstrategy._src.text import shown, whole
from jaxstrategy._src.training.precision import all_finite
from jaxstrategy._src.values import arrays, building
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica, is_per_replica

if TYPE_CHECKING:
    from optax import (
        ApplyIfFiniteState,
        GradientTransformation,
        GradientTransformationExtraArgs,
    )


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
    outer_tx = outer or optax.sgd(1.0)
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

    def init(params: PyTree) -> OuterState:
        _check_params(params)
        inner_state, outer_state = inner.init(params), outer_tx.init(params)
        # Arrays of its own: both may be donated.
        own = jax.tree.map(
            lambda x: jnp.array(x, jnp.asarray(x).dtype, copy=True), params
        )
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
            """Updates that make the parameters equal on all replicas."""
            ends = optax.apply_updates(params, updates)
            distances = jax.tree.map(lambda start, end: start - end, state.params, ends)
            mean = _replica().all_reduce("mean", distances, options=options)
            step, outer_state = outer_tx.update(mean, state.outer_state, state.params)
            new = optax.apply_updates(state.params, step)
            return jax.tree.map(_difference, params, new), new, outer_state

        def go_on() -> tuple[PyTree, PyTree, PyTree]:
            return updates, state.params, state.outer_state

        if number == 1:
            found = synchronize()
        else:
            found = jax.lax.cond(steps == number, synchronize, go_on)
        updates, together, outer_state = found
        return updates, OuterState(steps % number, together, inner_state, outer_state)

    return optax.GradientTransformationExtraArgs(init, update)


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
    zeros = jnp.zeros(jnp.shape(param), wide)
    # None is Optax's own sign of a parameter that stays.
    return zeros if update is None else jnp.asarray(update, wide)


def _difference(old: Leaf, new: jax.Array) -> jax.Array:
    wide = _wide(new.dtype)
    return new.astype(wide) - jnp.asarray(old, wide)


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


def optax_for(function: str) -> ModuleType:
    try:
        import optax
    except ImportError as missing:
        raise MissingExtraError(
            f"`jaxstrategy.optax.{function}` needs Optax, which is not installed. "
            "Install the extra: pip install 'jaxstrategy[flax]'"
        ) from missing
    return optax


def check_transformation(name: str, given: GradientTransformation) -> None:
    # A dict has an `update`, too.
    if not all(callable(getattr(given, n, None)) for n in ("init", "update")):
        raise TypeError(
            f"`{name}` was {shown(given)}; a transformation of Optax was wanted: "
            "`optax.chain(...)`."
        )


def own_copies(state: PyTree, *, strategy: AnyStrategy) -> PyTree:
    """`state` with a copy for each replica of what `outer` lets become its own.

    Those are all floating-point arrays, parameters for one: each becomes a `PerReplica`
    of equal versions. Of an `OuterState` it is the state of the inner optimizer only;
    whole numbers, such as counters, stay as they are. A training that begins so has
    its state in the same form from the first step to the last. It is compiled once, no
    warning asks whether a reduction was forgotten, and its checkpoints fit what it
    begins with. Leave out what the steps reduce by themselves, as statistics of
    BatchNorm: `state.replace(params=own_copies(state.params, strategy=strategy), ...)`.

    Args:
      state: a pytree, such as a `TrainState` whose optimizer is `outer(...)`, or one of
        parameters and an `OuterState`. Its arrays have any shapes, `[...]`.
      strategy: whose replicas they are. With one replica all stays as it is.

    Returns:
      A pytree of the same structure, but for `PerReplica`s of versions `[...]`.

    Raises:
      TypeError: something else than a strategy.
      ContextError: inside `run`.

    >>> import optax
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> params = np.zeros(3, np.float32)
    >>> state = params, js.optax.outer(optax.adam(0.1), every=4).init(params)
    >>> params, state = js.optax.own_copies(state, strategy=strategy)
    >>> params
    PerReplica(float32[3] on cpu:0, cpu:1)
    >>> state.inner_state[0].mu
    PerReplica(float32[3] on cpu:0, cpu:1)
    >>> state.params
    Array([0., 0., 0.], dtype=float32)
    """
    core = checked_strategy(strategy)
    if core.num_replicas_in_sync == 1:
        return state

    def own(leaf: Leaf) -> Leaf:
        if isinstance(leaf, OuterState):
            inner = own_copies(leaf.inner_state, strategy=core)
            return leaf._replace(inner_state=inner)
        if is_per_replica(leaf) or not _is_float(leaf):
            return leaf
        return building.equal_versions(core.mirror(leaf), core._replicas)

    return jax.tree.map(own, state, is_leaf=_is_end)


def _is_end(node: object) -> bool:
    return isinstance(node, OuterState) or is_per_replica(node)


def _is_float(leaf: Leaf) -> bool:
    if isinstance(leaf, (float, complex)):
        return True
    return arrays.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def all_reduce_gradients(
    op: ReduceOp | str = ReduceOp.MEAN, options: CommunicationOptions | None = None
) -> GradientTransformation:
    """A transformation that reduces gradients over the replicas.

    What comes after it in a chain (clipping, moments, moving averages) sees the same
    gradients on all replicas, so the parameters stay equal. Small arrays are joined
    before they are reduced. Put it first; before it, only what is linear in the
    gradients, such as `optax.scale`, gives what one device would.

    With `optax.MultiSteps` around the chain, replicas sum up their own gradients and
    reduce once in k steps; inside it, after this, they reduce at each. The parameters
    are the same; the first sends k times less, and its state holds `PerReplica`s.

    Outside any strategy it changes nothing. In cross-replica context it reduces as
    `strategy.reduce` does.

    With a `compression` in the options its state is a `CompressionState`: what each
    replica has not sent yet, and adds to its next gradients. Call `init` in
    `strategy.scope()` or by `strategy.init`, so that it is made for all replicas.
    Gradients that come around several times before they arrive want a smaller learning
    rate, the smaller the more a compression leaves out.

    Args:
      op: "mean" for gradients of the mean loss of each replica, "sum" for those of
        `compute_average_loss`.
      options: how, instead of as the strategy does; also with a `compression`.

    Raises:
      ValueError: `op` is not a reduction.
      TypeError: `options` are none.
      MissingExtraError: Optax is not installed.

    >>> import optax
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> tx = optax.chain(js.optax.all_reduce_gradients(), optax.sgd(0.1))
    >>> @strategy.run
    ... def step(w, state, x):
    ...     grad = jax.grad(lambda w: w * x)(w)
    ...     updates, state = tx.update(grad, state, w)
    ...     return optax.apply_updates(w, updates), state
    >>> w, state = step(2.0, tx.init(2.0), strategy.per_replica([1.0, 2.0, 3.0, 4.0]))
    >>> w
    Array(1.75, dtype=float32)
    """
    op = ReduceOp(op)
    checked_options(options, with_compression=True)
    if options is not None and options.compression is not None:
        return _compressing(op, options)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        del params
        replica = get_replica_context()
        reduce = get_strategy().reduce if replica is None else replica.all_reduce
        return reduce(op, updates, options=options), state

    optax = optax_for("all_reduce_gradients")
    return optax.GradientTransformation(optax.init_empty_state, update)


def _compressing(op: ReduceOp, options: CommunicationOptions) -> GradientTransformation:
    """A transformation that reduces gradients and keeps what was not sent of them."""

    def reduce(updates: PyTree, state: CompressionState) -> tuple[PyTree, PyTree]:
        replica = get_replica_context()
        return replica.all_reduce_compressed(op, updates, state, options)

    def init(params: PyTree) -> CompressionState:
        in_step = get_replica_context() is not None
        strategy = get_strategy()
        replicas = strategy._replicas
        return cross_replica.compression_state(params, options, replicas, own=in_step)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        del params
        if get_replica_context() is not None:
            return reduce(updates, state)
        return get_strategy().run(reduce, (updates, state))

    compression.check_compressible(op)
    return optax_for("all_reduce_gradients").GradientTransformation(init, update)


def apply_if_finite(
    inner: GradientTransformation, max_consecutive_errors: int
) -> GradientTransformationExtraArgs:
    """`inner`, except for steps in which a gradient is not finite on any replica.

    As `optax.apply_if_finite`, with its state (`optax.ApplyIfFiniteState`), but all
    replicas agree: if one has an infinity or a NaN, none of them steps. Optax's own,
    around a chain that reduces, would hang, since only some replicas would reach the
    reduction; `run` refuses it.

    Args:
      inner: what is applied to finite gradients.
      max_consecutive_errors: after so many skipped steps in a row, the next is taken
        whatever it holds.

    Raises:
      MissingExtraError: Optax is not installed.

    >>> import optax
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> reduced = optax.chain(js.optax.all_reduce_gradients(), optax.sgd(0.1))
    >>> tx = js.optax.apply_if_finite(reduced, 5)
    >>> grad = strategy.per_replica([1.0, np.nan])
    >>> update, state = strategy.run(tx.update, (grad, tx.init(0.0)))
    >>> print(update, state.total_notfinite)
    0.0 1
    """
    optax = optax_for("apply_if_finite")
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> ApplyIfFiniteState:
        zero = jnp.zeros([], jnp.int32)
        return optax.ApplyIfFiniteState(zero, jnp.array(True), zero, inner.init(params))

    def update(
        updates: PyTree,
        state: ApplyIfFiniteState,
        params: PyTree = None,
        **extra: PyTree,
    ) -> tuple[PyTree, ApplyIfFiniteState]:
        finite = all_finite(updates)
        in_a_row = jnp.where(finite, 0, optax.safe_increment(state.notfinite_count))
        total = jnp.where(
            finite, state.total_notfinite, optax.safe_increment(state.total_notfinite)
        )

        def apply() -> tuple[PyTree, PyTree]:
            return inner.update(updates, state.inner_state, params, **extra)

        def skip() -> tuple[PyTree, PyTree]:
            return jax.tree.map(jnp.zeros_like, updates), state.inner_state

        updates, inner_state = jax.lax.cond(
            finite | (in_a_row > max_consecutive_errors), apply, skip
        )
        return updates, optax.ApplyIfFiniteState(in_a_row, finite, total, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def check_chain(
    transformation: GradientTransformation,
    params: PyTree,
    *,
    strategy: AnyStrategy,
    steps: int = 1,
) -> None:
    """Checks that replicas with a part of the batch each step as one with all of it.

    Gives the transformation gradients that differ between the replicas, and then their
    mean on all of them; the updates must be the same, for small gradients and large.
    They are not if gradients are clipped, normalized or put into moments before they
    are reduced, or are not reduced. For tests, and before a long run: it compiles the
    transformation and steps a few times on gradients drawn from a fixed seed.

    Args:
      transformation: a chain with `all_reduce_gradients` ("mean") in it.
      params: what it is for, a pytree of arrays of any shapes; not changed.
      strategy: any, with two replicas or more.
      steps: how many steps to take: k for `optax.MultiSteps` over k steps.

    Raises:
      ValueError: the updates differ, by more than rounding; the message says by how
        much. Or all of them are zero, or the strategy has one replica, which has
        nothing to reduce.
      TypeError: something else than a transformation or a strategy.

    >>> import optax
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> reduce, clip = js.optax.all_reduce_gradients(), optax.clip_by_global_norm(1.0)
    >>> params = {"w": np.ones(3, np.float32)}
    >>> js.optax.check_chain(optax.chain(reduce, clip), params, strategy=strategy)
    >>> wrong = optax.chain(clip, reduce)
    >>> try:
    ...     js.optax.check_chain(wrong, params, strategy=strategy)
    ... except ValueError as error:
    ...     print(str(error)[:72])
    The update of `params['w']` depends on how the gradients are spread over
    """
    core = _strategy.checked_strategy(strategy)
    check_transformation("transformation", transformation)
    n = core.num_replicas_in_sync
    if n < 2:
        raise ValueError(
            f"{core!r} has nothing to reduce; give a strategy with two replicas or "
            "more, such as `MirroredStrategy(js.simulate(8)[:2])`."
        )
    # Whether its state comes out different is looked at here.
    unchecked = RunOptions(expect_mirrored=False)
    step = core.run(options=unchecked)(transformation.update)

    def updates(gradients: list[PyTree]) -> list[PyTree]:
        state, taken = transformation.init(params), []
        for stacked in gradients:
            update, state = step(core.per_replica(stacked), state, params)
            taken.append(
                jax.tree.map(
                    lambda x: x.stacked if isinstance(x, PerReplica) else x[None],
                    update,
                    is_leaf=is_per_replica,
                )
            )
        return taken

    for size in (1e-3, 1.0, 1e3):
        drawn = [_gradients(params, n, size, seed) for seed in range(steps)]
        means = [jax.tree.map(_mean, gradients) for gradients in drawn]
        have, want = updates(drawn), updates(means)
        if not any(np.any(leaf) for leaf in jax.tree.leaves(want)):
            raise ValueError(
                f"All updates of {len(want)} steps are zero, so nothing was checked. "
                "Give more `steps`: k for `optax.MultiSteps` over k steps, one more "
                "for a learning rate that begins at 0."
            )
        for one, other in zip(have, want, strict=True):
            _check_equal(one, other, size)


# Gradients are rounded in another order; a chain may reduce them in bfloat16.
_TOLERANCE = 0.02


def _check_equal(have: PyTree, want: PyTree, size: float) -> None:
    found, _ = jax.tree.flatten_with_path(have)
    for (path, one), other in zip(found, jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        distance, norm = np.linalg.norm(one - other), np.linalg.norm(other)
        if not distance <= _TOLERANCE * norm:
            raise ValueError(
                f"The update of `params{jax.tree_util.keystr(path)}` depends on how "
                "the gradients are spread over the replicas: it differs from that of "
                f"their mean by {distance:.2g}, of {norm:.2g}, for gradients of size "
                f"{size:g}. They are not reduced, or something that is not linear in "
                "them (clipping, Adam) comes before the reduction: put "
                "`all_reduce_gradients()` first in the chain."
            )


def _gradients(params: PyTree, n: int, size: float, seed: int) -> PyTree:
    draw = np.random.default_rng(seed)

    def like(leaf: Leaf) -> np.ndarray:
        drawn = draw.standard_normal((n, *np.shape(leaf)))
        # Some replicas are much further out than others, as in a batch with outliers.
        far = np.arange(1, n + 1).reshape(-1, *[1] * np.ndim(leaf))
        return np.asarray(size * (drawn + 0.5) * far, mesh.array_of(leaf).dtype)

    return jax.tree.map(like, params)


def _mean(stacked: np.ndarray) -> np.ndarray:
    mean = stacked.astype(np.float64).mean(0, keepdims=True)
    return np.broadcast_to(mean, stacked.shape).astype(stacked.dtype)
