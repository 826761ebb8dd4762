"""Metrics in a run of Trackio on this computer."""

import os
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    os.environ["TRACKIO_DIR"] = folder
    import jaxstrategy as js

    with js.profiling.MetricLogger(js.profiling.TrackioWriter("smoke")) as log:
        log(0, {"loss": 1.0})
    assert list(Path(folder).rglob("smoke*")), list(Path(folder).rglob("*"))
