"""Names of `tf.distribute` that are not here, and what to use instead."""

from __future__ import annotations

_OF_TENSORFLOW_2 = (
    "coordinator",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputOptions",
)

ADVICE = {
    "compat.v1.distribute": (
        "Here its names are those of `compat.v1` itself: `from jaxstrategy.compat "
        "import v1 as distribute`."
    ),
    **{
        f"compat.v1.{name}": f"It is one of 2.x, and here `jaxstrategy.{name}`."
        for name in _OF_TENSORFLOW_2
    },
}


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that `module` does not have.

    A name of `tf.distribute` is followed by what to use instead.
    """
    full = f"{module}.{name}".removeprefix("jaxstrategy.")
    text = f"module {module!r} has no attribute {name!r}"
    if full in ADVICE:
        text = f"{text}, which TensorFlow has. {ADVICE[full]}"
    return AttributeError(text, name=name)
