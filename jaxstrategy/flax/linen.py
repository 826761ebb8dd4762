"""`BatchNorm` of flax.linen, synchronized over the replicas."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.flax._linen import BatchNorm as BatchNorm
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "flax._linen": "BatchNorm",
        },
        extra=("flax", "Flax"),
    )
