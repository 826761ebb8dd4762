"""Flax layers and helpers that know the replicas of the current strategy.

`linen.BatchNorm` and `nnx.BatchNorm` take the place of Flax's own. Their statistics are
those of the global batch: no axis name is typed, and the same model works under every
strategy, in `model.init`, and with no strategy at all.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.flax.statistics import (
        average_statistics as average_statistics,
        axis_name as axis_name,
    )
    from jaxstrategy.flax import linen as linen, nnx as nnx
else:
    __getattr__, __dir__ = lazy_names.attach(__name__, extra=("flax", "Flax"))
