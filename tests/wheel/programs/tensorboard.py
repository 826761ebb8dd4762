"""Metrics in files for TensorBoard."""

import tempfile
from pathlib import Path

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    with js.profiling.MetricLogger(folder) as log:
        log(0, {"loss": 1.0})
    (file,) = Path(folder).iterdir()
    assert "tfevents" in file.name and file.stat().st_size > 0
