"""What was recorded from TensorFlow and others: `tests/oracle/`."""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parents[1] / "oracle"


def recorded(name):
    return json.loads((FOLDER / name).read_text())
