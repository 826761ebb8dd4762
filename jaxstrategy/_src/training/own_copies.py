"""State of which each replica is to have its own, before the first step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxstrategy._src.contexts.strategy_face import AnyStrategy
from jaxstrategy._src.strategies.strategy import checked_strategy
from jaxstrategy._src.training.outer_optimizer import OuterState
from jaxstrategy._src.values import arrays, building
from jaxstrategy._src.values.per_replica import is_per_replica
from jaxstrategy._src.values.types import Leaf, PyTree


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
