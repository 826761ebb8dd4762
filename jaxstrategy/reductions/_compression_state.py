"""What compressed reductions keep from one step to the next: `CompressionState`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstrategy._communication_options import CommunicationOptions, PowerSGD
from jaxstrategy.reductions._compressed import Owed
from jaxstrategy.reductions._compression import Compression, memory_of
from jaxstrategy.reductions._eight_bit_numbers import EightBitNumbers
from jaxstrategy.reductions._thin_matrices import ThinMatrices
from jaxstrategy.text._array_types import array_type
from jaxstrategy.text._shown import shown
from jaxstrategy.values._slices import is_slices
from jaxstrategy.values._types import Leaf, PyTree, TreeStructure


class CompressionState(NamedTuple):
    """What compressed reductions keep from one step to the next.

    `strategy.compression_state` makes it, `optax.all_reduce_gradients` in its `init`;
    each reduction returns the next. It is part of the training state: save it with the
    parameters. Its errors belong to single replicas, so a checkpoint of it wants the
    same number of them; `strategy.reduce("mean", state)` is a state for any number,
    with the same mean of what is still to be sent.

    Attributes:
      errors: a pytree like the gradients: what each replica has not sent yet, as
        `PerReplica`s of their shapes, in 32 bits or more; None for an array that is
        reduced exactly.
      bases: the same of the directions that `PowerSGD` begins with, `[columns, rank]`
        and equal on all replicas; None where there are none.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> options = js.experimental.CommunicationOptions(compression="int8")
    >>> w = np.zeros(1000, np.float32)
    >>> strategy.compression_state(w, options)
    CompressionState(errors=PerReplica(float32[1000] on cpu:0, cpu:1), bases=None)
    """

    errors: PyTree
    bases: PyTree


def compression_of(options: CommunicationOptions | None) -> Compression:
    """The compression that options ask for.

    Raises:
      ValueError: they ask for none.
    """
    asked = None if options is None else options.compression
    if asked is None:
        raise ValueError(
            f"`options` was {options!r}, which have no `compression`. Give "
            "`CommunicationOptions(compression='int8')`, or reduce exactly: "
            "`get_replica_context().all_reduce(op, value)`."
        )
    return ThinMatrices(asked) if isinstance(asked, PowerSGD) else EightBitNumbers()


def initial_state(
    params: PyTree, options: CommunicationOptions | None
) -> CompressionState:
    """A state in which nothing is owed, with the types of a replica's errors.

    Raises:
      ValueError: the options ask for no compression.
    """
    compression = compression_of(options)
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_slices)
    errors: list[Leaf] = []
    bases: list[Leaf] = []
    for number, leaf in enumerate(leaves):
        memory = None if is_slices(leaf) else memory_of(compression, _type_of(leaf))
        basis = None if memory is None else compression.basis(memory, number)
        errors.append(memory)
        bases.append(basis)
    return CompressionState(treedef.unflatten(errors), treedef.unflatten(bases))


def _type_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)


def checked_debts(
    state: object,
    leaves: Sequence[Leaf],
    paths: Sequence[str],
    treedef: TreeStructure,
    compression: Compression,
) -> list[Owed | None]:
    """What `state` says is owed of each leaf; None of those that are not compressed.

    Args:
      state: a `CompressionState`.
      leaves: what is reduced.
      paths: how messages call them.
      treedef: the structure that they are in.
      compression: what is sent of them.

    Raises:
      TypeError: it is no state.
      ValueError: it is one of other arrays, or of another compression.
    """
    if not isinstance(state, CompressionState):
        raise TypeError(
            f"`state` was {shown(state)}; a `CompressionState` was wanted: what "
            "`strategy.compression_state(params, options)` or "
            "`optax.all_reduce_gradients(options=...).init(params)` made, or what the "
            "last reduction returned."
        )
    try:
        errors = treedef.flatten_up_to(state.errors)
        bases = treedef.flatten_up_to(state.bases)
    except ValueError as error:
        raise ValueError(
            f"`state` was made for another tree than what is reduced: {error}. {_MAKE}"
        ) from error
    owed: list[Owed | None] = []
    for leaf, path, error, basis in zip(leaves, paths, errors, bases, strict=True):
        if error is not None and not is_slices(leaf):
            _check(leaf, path, error, basis, compression)
        owed.append(None if error is None else Owed(error, basis))
    return owed


def state_of(owed: Sequence[Owed | None], treedef: TreeStructure) -> CompressionState:
    """The state that says what is owed of each leaf."""
    return CompressionState(
        treedef.unflatten([None if debt is None else debt.error for debt in owed]),
        treedef.unflatten([None if debt is None else debt.basis for debt in owed]),
    )


_MAKE = "Make a new one: `strategy.compression_state(grads, options)`."


def _check(
    leaf: Leaf,
    path: str,
    error: jax.Array,
    basis: jax.Array | None,
    compression: Compression,
) -> None:
    given = _type_of(leaf)
    memory = memory_of(compression, given)
    if memory is None or memory.shape != error.shape or memory.dtype != error.dtype:
        raise ValueError(
            f"`value{path}` is {array_type(given.dtype, given.shape)}, and `state` has "
            f"errors {array_type(error.dtype, error.shape)} for it, which are another "
            f"array's, or another compression's. {_MAKE}"
        )
    wanted = jax.eval_shape(lambda: compression.basis(memory, 0))
    have = None if basis is None else basis.shape
    if have != (None if wanted is None else wanted.shape):
        raise ValueError(
            f"`state` has a basis of shape {have} for `value{path}`, and this "
            f"compression one of {wanted and wanted.shape}: another compression made "
            f"it. {_MAKE}"
        )
