"""The demo, shortened."""

import subprocess
import sys
from pathlib import Path

command = [sys.executable, "-m", "jaxstrategy.demo", "--epochs", "1"]
done = subprocess.run([*command, "--out", "demo.png"], timeout=300)
assert done.returncode == 0
assert Path("demo.png").read_bytes().startswith(b"\x89PNG")
