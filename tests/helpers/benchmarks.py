"""Scripts of `benchmarks/` as modules."""

import functools
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@functools.cache
def load(name):
    """The module of this name."""
    scripts = {path.stem for path in FOLDER.glob("[!_]*.py")}
    others = {known: sys.modules.pop(known) for known in scripts & sys.modules.keys()}
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for script in scripts:
            sys.modules.pop(script, None)
        sys.modules.update(others)
