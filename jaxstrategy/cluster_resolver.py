"""What a cluster is and which of its processes this one is; as in TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.cluster.resolvers._cluster_resolver import (
        ClusterResolver as ClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._cluster_resolver import Process as Process
    from jaxstrategy.cluster.resolvers._cluster_resolver import (
        SimpleClusterResolver as SimpleClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._cluster_resolver import (
        UnionClusterResolver as UnionClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec as ClusterSpec
    from jaxstrategy.cluster.resolvers._environment import (
        LaunchedClusterResolver as LaunchedClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._environment import (
        SageMakerClusterResolver as SageMakerClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._environment import (
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._gce import (
        GCEClusterResolver as GCEClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._kubernetes import (
        KubernetesClusterResolver as KubernetesClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._kubernetes import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from jaxstrategy.cluster.resolvers._slurm import (
        SlurmClusterResolver as SlurmClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._tpu import (
        TPUClusterResolver as TPUClusterResolver,
    )

    UnionResolver = UnionClusterResolver
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "cluster.resolvers._cluster_resolver": (
                "ClusterResolver Process SimpleClusterResolver UnionClusterResolver "
                "UnionResolver=UnionClusterResolver"
            ),
            "cluster.resolvers._cluster_spec": "ClusterSpec",
            "cluster.resolvers._environment": (
                "LaunchedClusterResolver SageMakerClusterResolver "
                "TFConfigClusterResolver"
            ),
            "cluster.resolvers._gce": "GCEClusterResolver",
            "cluster.resolvers._kubernetes": (
                "KubernetesClusterResolver KubernetesExecutableLocation"
            ),
            "cluster.resolvers._slurm": "SlurmClusterResolver",
            "cluster.resolvers._tpu": "TPUClusterResolver",
        },
    )
