"""Flax layers and helpers that know the replicas of the current strategy.

`linen.BatchNorm` and `nnx.BatchNorm` take the place of Flax's own. Their statistics are
those of the global batch: no axis name is typed, and the same model works under every
strategy, in `model.init`, and with no strategy at all.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.flax import linen as linen
    from jaxstrategy.flax import nnx as nnx
    from jaxstrategy.flax._statistics import average_statistics as average_statistics
    from jaxstrategy.flax._statistics import axis_name as axis_name
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {"flax._statistics": "average_statistics axis_name"},
        modules=["flax.linen", "flax.nnx"],
        extra=("flax", "Flax"),
    )
