"""Metrics in an offline run of Weights & Biases."""

import tempfile
from pathlib import Path

import wandb

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    run = wandb.init(project="smoke", mode="offline", dir=folder)
    with js.profiling.MetricLogger(
        lambda n, scalars: run.log({**scalars, "step": n})
    ) as log:
        log(0, {"loss": 1.0})
    run.finish()
    files = list(Path(folder).rglob("run-*.wandb"))
    assert files and files[0].stat().st_size > 0
