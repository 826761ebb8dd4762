"""Metrics in a run of MLflow that files keep."""

import os
import tempfile
from pathlib import Path

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a database needs all of MLflow
import mlflow

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    mlflow.set_tracking_uri(f"file:{folder}/runs")
    with mlflow.start_run(run_name="smoke"):
        with js.profiling.MetricLogger(
            lambda step, scalars: mlflow.log_metrics(scalars, step=step)
        ) as log:
            log(0, {"loss": 1.0})
    run = mlflow.last_active_run()
    assert run.data.metrics == {"loss": 1.0}, run
    assert Path(folder, "runs").exists()
