"""Metrics in files for TensorBoard."""

import tempfile
from pathlib import Path

from tensorboardX import SummaryWriter

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    with SummaryWriter(folder) as board:

        def write(step, scalars):
            for name, value in scalars.items():
                board.add_scalar(name, value, step)

        with js.profiling.MetricLogger(write) as log:
            log(0, {"loss": 1.0})
    (file,) = Path(folder).iterdir()
    assert "tfevents" in file.name and file.stat().st_size > 0
