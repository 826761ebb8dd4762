"""What a cluster is and which of its processes this one is; as in TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.cluster.resolvers._cluster_resolver import (
        ClusterResolver as ClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._cluster_resolver import Process as Process
    from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec as ClusterSpec
    from jaxstrategy.cluster.resolvers._gce_resolver import (
        GCEClusterResolver as GCEClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._kubernetes_location import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from jaxstrategy.cluster.resolvers._kubernetes_resolver import (
        KubernetesClusterResolver as KubernetesClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._launched import (
        LaunchedClusterResolver as LaunchedClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._sagemaker_resolver import (
        SageMakerClusterResolver as SageMakerClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._simple import (
        SimpleClusterResolver as SimpleClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._slurm_resolver import (
        SlurmClusterResolver as SlurmClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._tf_config import (
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._tpu_resolver import (
        TPUClusterResolver as TPUClusterResolver,
    )
    from jaxstrategy.cluster.resolvers._union import (
        UnionClusterResolver as UnionClusterResolver,
    )

    UnionResolver = UnionClusterResolver
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "cluster.resolvers._cluster_resolver": "ClusterResolver Process",
            "cluster.resolvers._cluster_spec": "ClusterSpec",
            "cluster.resolvers._gce_resolver": "GCEClusterResolver",
            "cluster.resolvers._kubernetes_location": ("KubernetesExecutableLocation"),
            "cluster.resolvers._kubernetes_resolver": "KubernetesClusterResolver",
            "cluster.resolvers._launched": "LaunchedClusterResolver",
            "cluster.resolvers._sagemaker_resolver": "SageMakerClusterResolver",
            "cluster.resolvers._simple": "SimpleClusterResolver",
            "cluster.resolvers._slurm_resolver": "SlurmClusterResolver",
            "cluster.resolvers._tf_config": "TFConfigClusterResolver",
            "cluster.resolvers._tpu_resolver": "TPUClusterResolver",
            "cluster.resolvers._union": (
                "UnionClusterResolver UnionResolver=UnionClusterResolver"
            ),
        },
    )
