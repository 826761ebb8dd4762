"""Several programs one after the other, in the same processes of one job."""

import importlib
import pathlib
import sys


def main(names):
    root = pathlib.Path(sys.path[0])
    for name in names:
        module, _, function = name.partition(".")
        sys.path[0] = str(root / module)  # a folder of its own
        pathlib.Path(sys.path[0]).mkdir(exist_ok=True)
        print(f"=== {name}", flush=True)
        getattr(importlib.import_module(f"workers.{module}"), function or "main")()
        print("all is well", flush=True)
    print("=== end", flush=True)
