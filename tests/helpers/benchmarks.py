"""Scripts of `benchmarks/` as modules."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


def load(name):
    """The module of this name."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
