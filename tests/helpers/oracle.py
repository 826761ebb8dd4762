"""What was recorded from TensorFlow and others: `tests/oracle/`."""

import functools
import importlib
import json
import pathlib

FOLDER = pathlib.Path(__file__).parents[1] / "oracle"


def recorded(name):
    return json.loads((FOLDER / name).read_text())


def found_at(place):
    """What has this name with dots; None if nothing has."""
    parts = place.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(
            lambda found, part: getattr(found, part, None), parts[end:], module
        )
