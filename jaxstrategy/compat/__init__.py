"""Names of the older generations of TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.compat import contrib as contrib
    from jaxstrategy.compat import v1 as v1
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__, {}, modules=["compat.contrib", "compat.v1"]
    )
