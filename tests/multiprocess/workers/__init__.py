"""Programs of the processes that the tests start."""

import json
import os
import pathlib

_FOLDER = pathlib.Path(__file__).parent.parent
PATH = os.pathsep.join([str(_FOLDER), str(_FOLDER.parent.parent)])
"""What Python must be told to import this, and the package as it lies beside it."""

LAYOUT = json.loads(os.environ.get("LAYOUT", "{}"))
"""Which devices of a process are one replica, or how many replicas share one."""

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("TF_CONFIG", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
}
"""Of processes that get devices of their own."""


def environment(devices, **layout):
    """Of processes with so many devices, and replicas that lie on them so."""
    return {
        "PYTHONPATH": PATH,
        "JAX_NUM_CPU_DEVICES": str(devices),
        "LAYOUT": json.dumps(layout),
    }
