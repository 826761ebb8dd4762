"""Computing in 16 bits, with parameters and reductions in 32.

Give `loss_fn` the float32 parameters and let it compute with 16-bit copies of them:
gradients come back in float32. bfloat16 needs nothing else. float16 loses gradients
below 6e-8, so its loss is scaled up, by a `DynamicLossScale`, and the gradients down.

`flax.training.dynamic_scale` does the same with less freedom. It takes the gradient
itself, by `jax.value_and_grad`: not by `nnx.value_and_grad`, not that of variables, and
not in parts of a batch. It looks whether it is finite where it is not yet reduced,
unless an axis is named, so that each replica has a factor of its own (measured with
Flax 0.12). It begins with Python numbers, so that a step is compiled twice, and makes
float32 of float64. And Flax need not be installed here.
"""

from __future__ import annotations

import dataclasses
from typing import Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.text import shown
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree, Value

_MOST = float(np.finfo(np.float32).max)
_MOST_STEPS = int(np.iinfo(np.int32).max)


def cast_floating(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """`tree` with its arrays of real floating-point numbers as `dtype`.

    Integers, bools, complex numbers, random keys and what is not an array stay. The
    gradient with respect to an array has that array's dtype, not `dtype`.

    Raises:
      TypeError: `dtype` is not one of real floating-point numbers.

    >>> import jaxstrategy as js
    >>> params = {"b": np.ones(2, np.float32), "n": np.int32(3)}
    >>> js.training.cast_floating(params, "bfloat16")
    {'b': Array([1, 1], dtype=bfloat16), 'n': np.int32(3)}
    """
    try:
        wanted = jnp.dtype(dtype)
    except UnicodeEncodeError:
        wanted = shown(dtype)
    if isinstance(wanted, str) or not jnp.issubdtype(wanted, jnp.floating):
        raise TypeError(
            f"`dtype` is {wanted}; a type of floating-point numbers is wanted, such as "
            "'bfloat16' or 'float32'."
        )

    def cast(leaf: Leaf) -> Leaf:
        if arrays.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(leaf, wanted)
        return leaf

    return jax.tree.map(cast, tree)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether all numbers of `tree` are finite, on all replicas: a bool scalar.

    Inside `run` it is the same on every replica, so a `jax.lax.cond` or `jnp.where` on
    it takes all of them the same way. Integers count as finite.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.run(js.training.all_finite, (strategy.per_replica([1.0, np.inf]),))
    Array(False, dtype=bool)
    """
    leaves = map(mesh.array_of, jax.tree.leaves(tree))
    local = [jnp.isfinite(leaf).all() for leaf in leaves]
    finite = jnp.stack(local).all() if local else jnp.array(True)
    context, replica = _context.current(), get_replica_context()
    if replica is not None:
        return replica.all_reduce(ReduceOp.MIN, finite)
    if context.in_step and context.strategy is not None:  # in `merge_call`
        across = per_replica.from_local(finite, context.strategy._replicas)
        return context.strategy.reduce(ReduceOp.MIN, across)
    return finite


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A factor for the loss that follows what the gradients bear.

    A pytree: part of the training state, given to `run` and returned from it, carried
    by `jax.lax.scan`. Where gradients were not finite the step is to be skipped, and
    the factor falls; after `period` finite steps in a row it grows.

    Args:
      loss_scale: the factor to begin with.
      period: after how many finite steps the factor grows.
      factor: by how much it grows, and falls.
      min_loss_scale: how far it falls.
      finite_steps: how many finite steps there were since the factor changed.

    Raises:
      ValueError: `period` is less than 1, `factor` not more than 1, or one of the
        numbers more than 32 bits hold.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> @strategy.run
    ... def step(w, loss_scale, x):
    ...     def loss_fn(w):
    ...         half = js.training.cast_floating(w, "float16")
    ...         loss = ((half * x.astype("float16") - 1) ** 2).astype("float32").mean()
    ...         return loss_scale.scale(loss)
    ...     grad = js.get_replica_context().all_reduce("mean", jax.grad(loss_fn)(w))
    ...     grad = loss_scale.unscale(grad)
    ...     finite = js.training.all_finite(grad)
    ...     return jnp.where(finite, w - 0.1 * grad, w), loss_scale.adjust(finite)
    >>> x = strategy.per_replica(np.ones((4, 2), np.float32))
    >>> w, loss_scale = strategy.mirror((2.0, js.training.DynamicLossScale(2.0**16)))
    >>> for _ in range(3):
    ...     w, loss_scale = step(w, loss_scale, x)
    ...     print(f"{w:.3f} {loss_scale.loss_scale:.0f}")
    2.000 32768
    2.000 16384
    1.800 16384
    """

    loss_scale: Value = 2.0**15
    period: int = dataclasses.field(default=2000, metadata={"static": True})
    factor: float = dataclasses.field(default=2.0, metadata={"static": True})
    min_loss_scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    finite_steps: Value = np.int32(0)

    def __post_init__(self) -> None:
        # To JAX a Python float has another type than what `adjust` gives: a step would
        # be compiled twice.
        if isinstance(self.loss_scale, float):
            object.__setattr__(self, "loss_scale", np.float32(self.loss_scale))
        if not 1 <= self.period <= _MOST_STEPS:
            raise ValueError(
                f"`period` is {shown(self.period)}; at least 1 step is wanted, and at "
                f"most {_MOST_STEPS}."
            )
        if not 1 < self.factor <= _MOST:
            raise ValueError(
                f"`factor` is {shown(self.factor)}; more than 1 is wanted, and no more "
                "than float32 holds."
            )
        if not -_MOST <= self.min_loss_scale <= _MOST:
            raise ValueError(
                f"`min_loss_scale` is {shown(self.min_loss_scale)}; a number that "
                "float32 holds is wanted."
            )

    def scale(self, loss: PyTree) -> PyTree:
        """`loss` times the factor, in its own shapes.

        What was 16 bits wide becomes float32.

        Raises:
          ValueError: a Python number in `loss` that no dtype of JAX holds.
        """
        return self._times(loss, mesh.array_of(self.loss_scale, jnp.float32))

    def unscale(self, gradients: PyTree) -> PyTree:
        """`gradients` divided by the factor, in their own shapes.

        Those of 16 bits become float32.

        Raises:
          ValueError: a Python number in `gradients` that no dtype of JAX holds.
        """
        return self._times(gradients, 1 / mesh.array_of(self.loss_scale, jnp.float32))

    def adjust(self, grads_finite: Value) -> Self:
        """The factor for the next step.

        Args:
          grads_finite: whether this step's gradients were finite, a bool that is equal
            on all replicas, `all_finite(gradients)`.
        """
        scale = mesh.array_of(self.loss_scale, jnp.float32)
        steps = mesh.array_of(self.finite_steps, jnp.int32) + 1
        grads_finite = mesh.array_of(grads_finite)
        full = steps >= self.period
        larger = scale * float(self.factor)
        grown = jnp.where(full & jnp.isfinite(larger), larger, scale)
        fallen = jnp.maximum(scale / float(self.factor), float(self.min_loss_scale))
        return dataclasses.replace(
            self,
            loss_scale=jnp.where(grads_finite, grown, fallen),
            finite_steps=jnp.where(grads_finite & ~full, steps, 0),
        )

    @staticmethod
    def _times(tree: PyTree, number: jax.Array) -> PyTree:
        def times(leaf: Leaf) -> jax.Array:
            leaf = mesh.array_of(leaf)
            kept = jnp.promote_types(leaf.dtype, jnp.float32)
            return leaf.astype(kept) * number.astype(kept)

        return jax.tree.map(times, tree)
