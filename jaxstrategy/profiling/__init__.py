"""The speed of a training loop, and its logs.

`strategy.profile` times the steps of a loop; a `MetricLogger` writes their metrics,
without waiting for them.
"""

from jaxstrategy.profiling._logger import MetricLogger as MetricLogger
from jaxstrategy.profiling._profile import Profile as Profile
from jaxstrategy.profiling._profile_report import Report as Report
