"""Names of `tf.distribute` that are not here, and what to use instead."""

from __future__ import annotations

ADVICE = {
    "compat.v1.distribute": (
        "Of the names of TensorFlow 1.x here is "
        "`compat.v1.experimental.ParameterServerStrategy`; those of `tf.distribute` of "
        "2.x are the names of `jaxstrategy`."
    ),
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
