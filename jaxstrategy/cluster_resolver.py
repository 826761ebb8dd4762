"""What a cluster is and which of its processes this one is; as in TensorFlow."""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
        ClusterResolver as ClusterResolver,
        Process as Process,
        SimpleClusterResolver as SimpleClusterResolver,
        UnionClusterResolver as UnionClusterResolver,
    )
    from jaxstrategy._src.cluster.resolvers.cluster_spec import (
        ClusterSpec as ClusterSpec,
    )
    from jaxstrategy._src.cluster.resolvers.environment import (
        LaunchedClusterResolver as LaunchedClusterResolver,
        SageMakerClusterResolver as SageMakerClusterResolver,
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from jaxstrategy._src.cluster.resolvers.gce import (
        GCEClusterResolver as GCEClusterResolver,
    )
    from jaxstrategy._src.cluster.resolvers.kubernetes import (
        KubernetesClusterResolver as KubernetesClusterResolver,
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from jaxstrategy._src.cluster.resolvers.slurm import (
        SlurmClusterResolver as SlurmClusterResolver,
    )
    from jaxstrategy._src.cluster.resolvers.tpu import (
        TPUClusterResolver as TPUClusterResolver,
    )

    UnionResolver = UnionClusterResolver
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
