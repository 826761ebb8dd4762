"""Makes calls, and says before each which one it is: see `run.py`."""

import contextlib
import io
import json
import linecache
import os
import pathlib
import random
import sys
import traceback
import warnings

import jax
import numpy as np

import jaxstrategy as js

PACKAGE = str(pathlib.Path(js.__file__).parent)
# They say what went wrong inside, and not what a user did.
UNTOLD = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    SystemError,
    UnicodeError,
)


def finding(error):
    """What is wrong with an error; None if it is one that a user can act on."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if f.filename.startswith(PACKAGE)), None)
    if last is None or not isinstance(error, UNTOLD):
        return None
    is_inside = frames[-1].filename == last.filename
    line = linecache.getline(last.filename, last.lineno).strip()
    if is_inside and line.startswith("raise "):
        return None  # told on purpose
    if not is_inside and not isinstance(error, (OverflowError, RecursionError)):
        return None  # of a function that the user gave, or of a library
    where = f"{os.path.relpath(last.filename, PACKAGE)}:{last.lineno}: {line}"
    return f"{type(error).__name__}: {str(error)[:200]!r} at {where}"


TRACERS = [jax.jit, jax.grad, jax.make_jaxpr, jax.vmap]
SHAPES = [(), (2,), (2, 3)]


def made(call, draw, strategy):
    """Makes a call, a third of them while JAX traces what calls it."""
    from values import TRACED

    if draw.random() < 0.67:
        return called(call, draw, strategy)
    tracer, shape = draw.choice(TRACERS), draw.choice(SHAPES)

    def traced(x):
        TRACED[:] = [x, x > 0, x.astype(int)]
        try:
            called(call, draw, strategy)
        finally:
            TRACED.clear()
        return x.sum()

    # What `vmap` traces has a dimension less.
    shape = (2, *shape) if tracer is jax.vmap else shape
    given = np.ones(shape, np.float32)
    tracer(traced)(given)


def called(call, draw, strategy):
    """Makes a call with arguments for its parameters."""
    from targets import parameters
    from values import argument

    function = call(strategy)
    args, kwargs = [], {}
    for name, is_named, is_free in parameters(function):
        if is_free and draw.random() < 0.5:
            if not is_named:
                break
            continue
        value = argument(draw, strategy, name)
        if is_named:
            kwargs[name] = value
        else:
            args.append(value)
    result = function(*args, **kwargs)
    if hasattr(result, "__enter__") and hasattr(result, "__exit__"):
        with contextlib.suppress(AttributeError), result:
            pass
    with contextlib.suppress(ValueError):  # of an object of the user's
        repr(result)


def main():
    seed, first, last = map(int, sys.argv[1:])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = io.StringIO()
    warnings.simplefilter("ignore")
    devices = js.simulate(2)
    strategy = js.MirroredStrategy(devices)
    from targets import targets

    found = targets(strategy)
    names = sorted(found)
    for number in range(first, last):
        draw = random.Random(f"{seed}/{number}")
        name = draw.choice(names)
        print(json.dumps({"call": name, "number": number}), file=out)
        told = {"result": "returned"}
        try:
            made(found[name], draw, strategy)
        except Exception as error:
            told["result"] = "refused"
            if (wrong := finding(error)) is not None:
                told["finding"] = wrong
        js.experimental_set_strategy(None)
        print(json.dumps(told), file=out)
        if number % 200 == 199:
            jax.clear_caches()


if __name__ == "__main__":
    main()
