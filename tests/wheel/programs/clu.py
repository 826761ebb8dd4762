"""Metrics written by CLU."""

import tempfile
from pathlib import Path

from clu import metric_writers

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    writer = metric_writers.create_default_writer(folder, asynchronous=False)
    with js.profiling.MetricLogger(writer) as log:
        log(0, {"loss": 1.0})
    writer.close()
    files = [path.name for path in Path(folder).rglob("*tfevents*")]
assert files
