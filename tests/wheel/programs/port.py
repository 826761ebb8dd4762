"""A program of TensorFlow, ported."""

import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
"""
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "train.py"
    path.write_text(PROGRAM)
    port = [sys.executable, "-m", "jaxstrategy.compat.port", "--write", str(path)]
    done = subprocess.run(port, capture_output=True, text=True, timeout=300)
    text = path.read_text()
assert "jaxstrategy" in text and "MirroredStrategy()" in text, done.stderr + text
