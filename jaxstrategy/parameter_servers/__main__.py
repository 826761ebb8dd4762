"""`python -m jaxstrategy.parameter_servers`: the task that TF_CONFIG describes.

A worker or a parameter server of a cluster, which serves one coordinator after the
other until it is ended.
"""

import sys

from jaxstrategy._src.cluster.resolvers.environment import TFConfigClusterResolver
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import is_for_servers
from jaxstrategy._src.parameter_servers.server import Server


def main() -> int:
    """Serve; the exit code where that cannot be."""
    resolver = TFConfigClusterResolver()
    try:
        spec = resolver.cluster_spec()
        if not is_for_servers(spec):
            raise ValueError(f"the cluster of TF_CONFIG has no `ps` job: {spec}")
        Server(spec, resolver.task_type, resolver.task_id).join()
    except (ValueError, ClusterError) as error:
        print(f"jaxstrategy.parameter_servers: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
