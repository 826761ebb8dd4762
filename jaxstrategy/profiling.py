"""The speed of a training loop, and its logs.

`strategy.profile` times the steps of a loop; a `MetricLogger` writes their metrics,
without waiting for them.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.profiling.comparison import (
        Comparison as Comparison,
        compare as compare,
    )
    from jaxstrategy._src.profiling.metric_logger import MetricLogger as MetricLogger
    from jaxstrategy._src.profiling.profile import Profile as Profile, Report as Report
    from jaxstrategy._src.replicas.topology import Topology as Topology
    from jaxstrategy._src.tracing.explanation.explanation import (
        Explanation as Explanation,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
