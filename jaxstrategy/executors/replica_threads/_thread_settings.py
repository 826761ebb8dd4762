"""JAX's settings in the thread of a replica, as in that of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from jaxstrategy._options import RunOptions
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._annotations import without_eager_sharding

Settings = Callable[[Replicas, int, Device], contextlib.AbstractContextManager[None]]
"""Of replicas, the number of one, and its device: a block with the settings."""


def thread_settings(options: RunOptions, disable_jit: bool) -> Settings:
    """The settings of the thread that asks, for those of replicas.

    JAX keeps them for each thread.

    Args:
      options: of the step; `check_finite` looks for NaN then, operation by operation.
      disable_jit: whether functions that are jitted run in Python, too.
    """
    config = jax.config
    has_wide, promotion = config.jax_enable_x64, config.jax_numpy_dtype_promotion
    ranks = config.jax_numpy_rank_promotion
    precision = config.jax_default_matmul_precision
    nans = config.jax_debug_nans or bool(options.check_finite)
    was_disabled = config.jax_disable_jit
    infs = config.jax_debug_infs

    @contextlib.contextmanager
    def entered(replicas: Replicas, number: int, device: Device) -> Iterator[None]:
        with contextlib.ExitStack() as blocks:
            for block in (
                jax.disable_jit(disable_jit or was_disabled),
                jax.default_device(device),
                jax.enable_x64(has_wide),
                jax.numpy_dtype_promotion(promotion),
                jax.numpy_rank_promotion(ranks),
                jax.default_matmul_precision(precision),
                jax.debug_nans(nans),
                jax.debug_infs(infs),
                without_eager_sharding(),
            ):
                blocks.enter_context(block)
            if replicas.inner_axes:
                blocks.enter_context(jax.set_mesh(replicas.mesh_of(number)))
            yield

    return entered
