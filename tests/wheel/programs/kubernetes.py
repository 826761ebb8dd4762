"""A resolver that asks Kubernetes, where there is none: that is what it says."""

import jaxstrategy as js

try:
    js.cluster_resolver.KubernetesClusterResolver({"worker": ["job-name=x"]})
except js.errors.MissingExtraError:
    raise
except js.ClusterError as error:
    assert "does not run in a pod" in str(error), error
else:
    raise AssertionError("there is no Kubernetes here")
