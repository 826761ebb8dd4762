"""Functions of one replica, whose devices are its own: `on_own_devices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.replicas import Lies, Replicas
from jaxstrategy._src.values.arrays import Function, PyTree


def on_own_devices(
    fn: Function, replicas: Replicas, taken: Sequence[Lies], returned: PyTree
) -> Function:
    """As `on_replicas`, for replicas with one device or several."""
    # check_vma=False: with True, JAX sums the gradient of a replicated value over
    # the replicas by itself, and the user's own mean of it is N times too large (JAX
    # 0.10 and 0.12).
    options: dict[str, Any] = {"check_vma": False}
    if replicas.inner_axes:
        options["axis_names"] = set(replicas.axes)
    return jax.shard_map(
        fn,
        mesh=replicas.mesh,
        in_specs=tuple(map(replicas.spec_of, taken)),
        out_specs=jax.tree.map(replicas.spec_of, returned),
        **options,
    )


def on_each_device(fn: Function, inner: InnerSpec, replicas: Replicas) -> Function:
    """`fn` of what one device has, as a function of what its replica has."""
    return jax.shard_map(
        fn,
        in_specs=inner,
        out_specs=inner,
        axis_names=set(replicas.inner_axes),
        check_vma=False,
    )


def on_all_devices(fn: Function, replicas: Replicas) -> Function:
    """`fn` that makes nothing, of whole arrays, called by each device of a replica."""
    return jax.shard_map(
        fn,
        in_specs=WHOLE,
        out_specs=WHOLE,
        axis_names=set(replicas.inner_axes),
        check_vma=False,
    )
