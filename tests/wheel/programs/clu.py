"""Metrics written by CLU."""

import tempfile
from pathlib import Path

import jaxstrategy as js

with tempfile.TemporaryDirectory() as folder:
    writer = js.profiling.CluWriter(folder, asynchronous=False)
    with js.profiling.MetricLogger(writer) as log:
        log(0, {"loss": 1.0})
    files = [path.name for path in Path(folder).rglob("*tfevents*")]
assert files
