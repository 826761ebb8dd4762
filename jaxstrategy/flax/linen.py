"""`BatchNorm` of flax.linen, synchronized over the replicas."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.flax.linen import BatchNorm as BatchNorm
else:
    __getattr__, __dir__ = lazy_names.attach(__name__, extra=("flax", "Flax"))
