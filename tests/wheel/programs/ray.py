"""Two processes of a job, started by a Ray of this machine."""

import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import jaxstrategy as js
strategy = js.MultiWorkerMirroredStrategy()
total = strategy.run(lambda: js.get_replica_context().all_reduce("sum", 1.0))
assert float(total) == 2.0, total
print("the sum is", float(total))
"""
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "train.py"
    script.write_text(SCRIPT)
    options = ["-n", "2", "--on", "ray", "--ray-cpus", "1"]
    command = [sys.executable, "-m", "jaxstrategy.launch", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
assert done.returncode == 0, done.stdout + done.stderr
assert "[1] the sum is 2.0" in done.stdout, done.stdout
