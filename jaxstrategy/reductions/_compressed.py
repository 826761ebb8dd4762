"""Compressed reductions with error feedback: what is not sent goes with the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._compression import Compression, Sent, Sums
from jaxstrategy.reductions._reduce_operations import OPERATIONS, checked
from jaxstrategy.reductions._reduce_operations import sums as names_of_sums
from jaxstrategy.values._types import Leaf


@dataclasses.dataclass(frozen=True)
class Owed:
    """What one leaf carries from one reduction to the next.

    Attributes:
      error: what this replica has not sent, `[...]`.
      basis: what the reduction begins with, if it begins with something.
    """

    error: jax.Array
    basis: jax.Array | None


def reduce_with_memory(
    op: ReduceOp,
    leaves: Sequence[Leaf],
    owed: Sequence[Owed | None],
    compression: Compression,
    sums: Sums,
    *,
    is_alone: bool,
) -> tuple[list[Leaf], list[Owed | None]]:
    """The sum or mean of each leaf over the replicas, and what is owed now.

    Args:
      op: SUM or MEAN.
      leaves: arrays and numbers.
      owed: of each leaf that is compressed; None for the others.
      compression: what is sent of them.
      sums: over the replicas.
      is_alone: whether there is one replica, which sends nothing.

    Raises:
      ValueError: `op` is no sum, or the plan has sums of its own.
      TypeError: a leaf is not a number, or has no such reduction.
      NotImplementedError: the result is differentiated.
    """
    check_compressible(op)
    pairs = list(zip(leaves, owed, strict=True))
    exact = [leaf for leaf, debt in pairs if debt is None]
    debts = [debt for debt in owed if debt is not None]
    arrays = [_with_debt(op, leaf, debt) for leaf, debt in pairs if debt is not None]
    if is_alone:
        exact = sums.exact(exact)
        sent = [Sent(array, jnp.zeros_like(array)) for array in arrays]
    else:
        bases = [debt.basis for debt in debts]
        exact, sent = compression.reduced(exact, arrays, bases, sums)
    unsent = iter(exact)
    settled = iter([_settled(*each) for each in zip(sent, debts, strict=True)])
    arrived = iter([each.value for each in sent])
    results = [
        next(unsent) if debt is None else next(arrived).astype(jnp.result_type(leaf))
        for leaf, debt in pairs
    ]
    return results, [None if debt is None else next(settled) for debt in owed]


def check_compressible(op: ReduceOp) -> None:
    """Raise unless `op` is a sum.

    Raises:
      ValueError: it is not.
    """
    if not OPERATIONS[op].is_sum:
        raise ValueError(
            f"{op.name} cannot be compressed, because what is not sent is added to the "
            f"next values; only {names_of_sums()} can. Use `all_reduce` for it."
        )


def _with_debt(op: ReduceOp, leaf: Leaf, debt: Owed) -> jax.Array:
    array = checked(op, leaf).astype(debt.error.dtype)
    return _not_differentiable(array) + debt.error


def _settled(sent: Sent, debt: Owed) -> Owed:
    """What is owed after a reduction.

    Of what is not finite nothing arrived that a step could use: who skips the step
    finds the old debt.
    """
    error = jnp.where(jnp.isfinite(sent.value), sent.missed, debt.error)
    return Owed(error, debt.basis if sent.basis is None else sent.basis)


@jax.custom_jvp
def _not_differentiable(array: jax.Array) -> jax.Array:
    return array


# Rounded numbers have the gradient 0, and thin matrices that of a decomposition: both
# would pass for the gradient of a sum without a word.
@_not_differentiable.defjvp
def _refuse(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # What JAX raises where there is no rule, so that who asks whether there is one
    # knows it.
    raise NotImplementedError(
        "A compressed reduction has no gradient: what arrives is rounded. Compress the "
        "gradients after `jax.grad` has made them; what is differentiated itself needs "
        "`get_replica_context().all_reduce`, without `compression`."
    )
