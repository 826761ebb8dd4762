"""The speed of a training loop, and its logs.

`strategy.profile` times the steps of a loop; a `MetricLogger` writes their metrics,
without waiting for them.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.profiling._comparison import Comparison as Comparison
    from jaxstrategy.profiling._comparison import compare as compare
    from jaxstrategy.profiling._goodput import Goodput as Goodput
    from jaxstrategy.profiling._limit import Limit as Limit
    from jaxstrategy.profiling._logger import MetricLogger as MetricLogger
    from jaxstrategy.profiling._profile import Profile as Profile
    from jaxstrategy.profiling._profile_report import Report as Report
    from jaxstrategy.profiling._run_record import RunRecord as RunRecord
    from jaxstrategy.profiling._run_writers import CluWriter as CluWriter
    from jaxstrategy.profiling._run_writers import MlflowWriter as MlflowWriter
    from jaxstrategy.profiling._run_writers import RunWriter as RunWriter
    from jaxstrategy.profiling._run_writers import (
        TensorBoardWriter as TensorBoardWriter,
    )
    from jaxstrategy.profiling._run_writers import TrackioWriter as TrackioWriter
    from jaxstrategy.profiling._run_writers import WandbWriter as WandbWriter
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "profiling._comparison": "Comparison compare",
            "profiling._goodput": "Goodput",
            "profiling._limit": "Limit",
            "profiling._logger": "MetricLogger",
            "profiling._profile": "Profile",
            "profiling._profile_report": "Report",
            "profiling._run_record": "RunRecord",
            "profiling._run_writers": (
                "CluWriter MlflowWriter RunWriter TensorBoardWriter TrackioWriter "
                "WandbWriter"
            ),
        },
    )
