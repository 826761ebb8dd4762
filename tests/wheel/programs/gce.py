"""A resolver that asks Google, without an account: that is what it says."""

import jaxstrategy as js

try:
    js.cluster_resolver.GCEClusterResolver("p", "zone", "group", 8470, task_id=0)
except js.errors.MissingExtraError:
    raise
except js.ClusterError as error:
    assert "There are no credentials" in str(error), error
else:
    raise AssertionError("there is no account here")
