"""`BatchNorm` and metrics of flax.nnx over the examples of all replicas."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.flax.nnx import (
        BatchNorm as BatchNorm,
        update_metrics as update_metrics,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__, extra=("flax", "Flax"))
