"""Names of the older generations of TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy.compat import contrib as contrib, v1 as v1
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
