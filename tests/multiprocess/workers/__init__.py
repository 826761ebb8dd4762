"""Programs of the processes that the tests start."""

import os
import pathlib

PATH = str(pathlib.Path(__file__).parent.parent)
"""What Python must be told to import this."""

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("TF_CONFIG", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
}
"""Of processes that get devices of their own."""
