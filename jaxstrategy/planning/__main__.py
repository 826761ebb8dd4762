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
    options = {x: y for x, y in vars(parser.parse_args()).items() if y is not None}
    module, _, name = (wanted := options.pop("function")).partition(":")
    if not (module and name):
        parser.error(f"{wanted!r} is not module:function, as train:planned")
    sys.path.insert(0, os.getcwd())
    import jaxstrategy as js

    if count := options.pop("simulate", 0):
        js.simulate(count)
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
            f"{wanted!r} returned {given!r}; the arguments of `js.plan` were wanted, "
            "`(build, step, batch)` or a dict"
        )
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    print(js.plan(*args, **kwargs | options))


if __name__ == "__main__":
    main()
