"""What training loops use besides a strategy: losses, precision, pipelines, a loop."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.training.losses import (
        compute_average_loss as compute_average_loss,
        scale_regularization_loss as scale_regularization_loss,
    )
    from jaxstrategy._src.training.pipeline import pipeline as pipeline
    from jaxstrategy._src.training.precision import (
        DynamicLossScale as DynamicLossScale,
        all_finite as all_finite,
        cast_floating as cast_floating,
    )
    from jaxstrategy._src.training.training_loop import training_loop as training_loop
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
