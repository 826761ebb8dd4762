"""`python -m jaxstrategy.planning`."""

import argparse
import importlib
import os
import sys


def main() -> None:
    """Prints a plan."""
    parser = argparse.ArgumentParser(prog="python -m jaxstrategy.planning")
    add = parser.add_argument
    add("function", help="module:function, which returns arguments of `js.plan`")
    add("--devices", help='as of `js.describe`, such as "v5p-64" or "cpu"')
    add("--memory", help='of one device, such as "16GiB"')
    add("--simulate", type=int, help="makes so many CPU devices before")
    args = parser.parse_args()
    module, _, name = args.function.partition(":")
    sys.path.insert(0, os.getcwd())
    import jaxstrategy as js

    if args.simulate:
        js.simulate(args.simulate)
    given = getattr(importlib.import_module(module), name)()
    wanted = {"devices": args.devices, "memory": args.memory}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    names = ("build", "step", "batch")
    told = given if isinstance(given, dict) else dict(zip(names, given, strict=True))
    print(js.plan(**told | wanted))


if __name__ == "__main__":
    main()
