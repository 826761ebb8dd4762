"""Metrics in a run of Trackio on this computer."""

import os
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    os.environ["TRACKIO_DIR"] = folder
    import trackio

    import jaxstrategy as js

    run = trackio.init(project="smoke")
    with js.profiling.MetricLogger(lambda n, scalars: run.log(scalars, step=n)) as log:
        log(0, {"loss": 1.0})
    run.finish()
    assert list(Path(folder).rglob("smoke*")), list(Path(folder).rglob("*"))
