"""The speed of a training loop, and its logs.

`strategy.profile` times the steps of a loop; a `MetricLogger` writes their metrics,
without waiting for them.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.profiling._comparison import Comparison as Comparison
    from jaxstrategy.profiling._comparison import compare as compare
    from jaxstrategy.profiling._metric_logger import MetricLogger as MetricLogger
    from jaxstrategy.profiling._profile import Profile as Profile
    from jaxstrategy.profiling._profile import Report as Report
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "profiling._comparison": "Comparison compare",
            "profiling._metric_logger": "MetricLogger",
            "profiling._profile": "Profile Report",
        },
    )
