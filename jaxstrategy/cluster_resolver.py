"""What a cluster is and which of its processes this one is; as in TensorFlow."""

from typing import NoReturn

from jaxstrategy import _absent
from jaxstrategy.cluster._launched import (
    LaunchedClusterResolver as LaunchedClusterResolver,
)
from jaxstrategy.cluster._resolver import ClusterResolver as ClusterResolver
from jaxstrategy.cluster._resolver import Process as Process
from jaxstrategy.cluster._simple import SimpleClusterResolver as SimpleClusterResolver
from jaxstrategy.cluster._slurm import SlurmClusterResolver as SlurmClusterResolver
from jaxstrategy.cluster._spec import ClusterSpec as ClusterSpec
from jaxstrategy.cluster._tf_config import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from jaxstrategy.cluster._union import UnionClusterResolver as UnionClusterResolver

UnionResolver = UnionClusterResolver


def __getattr__(name: str) -> NoReturn:
    """Names of TensorFlow that are not here say what to use instead."""
    raise _absent.missing(__name__, name)
