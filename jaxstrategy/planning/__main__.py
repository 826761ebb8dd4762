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
    add("--devices", help='as of `planning.describe`, such as "v5p-64" or "cpu"')
    add("--memory", help='of one device, such as "16GiB"')
    add("--simulate", type=int, help="makes so many CPU devices before")
    args = parser.parse_args()
    module, _, name = args.function.partition(":")
    if not (module and name):
        parser.error(f"{args.function!r} is not module:function, as train:planned")
    sys.path.insert(0, os.getcwd())
    import jaxstrategy as js

    if args.simulate:
        js.simulate(args.simulate)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as missing:
        if not f"{module}.".startswith(f"{missing.name}."):
            raise  # of what the module imports
        parser.error(f"there is no module {module!r}, here or installed")
    if not callable(function):
        parser.error(f"module {module!r} has no function {name!r}")
    given = function()
    if not isinstance(given, dict | list | tuple) or len(given) < 3:
        parser.error(
            f"{args.function!r} returned {given!r}; the arguments of `js.plan` were "
            "wanted, `(build, step, batch)` or a dict"
        )
    wanted = {"devices": args.devices, "memory": args.memory}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if isinstance(given, dict):
        print(js.plan(**given | wanted))
    else:
        print(js.plan(*given, **wanted))


if __name__ == "__main__":
    main()
