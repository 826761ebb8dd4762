"""`BatchNorm` and metrics of flax.nnx over the examples of all replicas."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.flax._metrics import update_metrics as update_metrics
    from jaxstrategy.flax._nnx import BatchNorm as BatchNorm
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "flax._metrics": "update_metrics",
            "flax._nnx": "BatchNorm",
        },
        extra=("flax", "Flax"),
    )
