"""TPUs as `tf.tpu` has them: where their cores are, and which replica has which."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy.tpu import experimental as experimental
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
