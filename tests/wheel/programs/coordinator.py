"""Functions of a coordinator on two workers, with variables on a parameter server."""

import os
import subprocess
import sys

if "TF_CONFIG" not in os.environ:
    command = [sys.executable, "-m", "jaxstrategy.launch", "--workers", "2", __file__]
    sys.exit(subprocess.run(command, timeout=300).returncode)

import jaxstrategy as js

strategy = js.ParameterServerStrategy()
coordinator = js.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = js.Variable(0.0)


@coordinator.function
def add(x):
    total.assign_add(x)
    return 2 * x


results = [coordinator.schedule(add, args=(float(x),)) for x in range(5)]
coordinator.join()
assert [float(result.fetch()) for result in results] == [0, 2, 4, 6, 8]
assert float(total.value()) == 10.0, total
