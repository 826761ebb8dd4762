"""Metrics in an offline run of Weights & Biases."""

import tempfile
from pathlib import Path

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    writer = js.profiling.WandbWriter(project="smoke", mode="offline", dir=folder)
    with js.profiling.MetricLogger(writer) as log:
        log(0, {"loss": 1.0})
    files = list(Path(folder).rglob("run-*.wandb"))
    assert files and files[0].stat().st_size > 0
