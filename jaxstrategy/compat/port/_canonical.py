"""The name under which the table has what a program imports: `canonical`."""

from __future__ import annotations

import re

from jaxstrategy.compat.port._generation import Generation
from jaxstrategy.compat.port._keras_uses import canonical_in_keras
from jaxstrategy.compat.port._names import FORMER, INTERNAL, NAMES

_V1, _CONTRIB = "tf.compat.v1.distribute", "tf.contrib.distribute"

_COLLECTIVE = ("CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy")
# Variables that are found again by their names.
_BY_NAME = {
    f"tf.{name}": {
        Generation.TF1: f"{_V1}.{name}",
        Generation.CONTRIB: f"{_CONTRIB}.{name}",
    }
    for name in "get_variable variable_scope AUTO_REUSE get_variable_scope".split()
}
# What TensorFlow 2 has at the top from Keras, and TensorFlow 1 of its own.
_OF_KERAS = re.compile(r"^tf\.(initializers|losses|metrics|optimizers)(?=\.|$)")


def canonical(full: str) -> str:
    """A name with `tf.` first, as `tf.distribute.Strategy`.

    Args:
      full: with TensorFlow's modules, as it is imported; also from the modules of
        TensorFlow's own code.
    """
    full = re.sub(r"^tensorflow_core\b", "tensorflow", full)
    name = _of_internal(full) or f"tf{full.removeprefix('tensorflow')}"
    name = re.sub(r"^tf\.compat\.(v2\b|v1\b(?!\.distribute\b))", "tf", name)
    name = re.sub(r"^tf\.dtypes\.(?=\w+$)", "tf.", name)
    name = FORMER.get(name, name)
    if f"{name}.".startswith("tf.keras."):
        return canonical_in_keras(name)
    if name not in NAMES:
        nearby = name.replace("tf.distribute.", "tf.distribute.experimental.", 1)
        return nearby if nearby in NAMES else name
    return name


def _of_internal(full: str) -> str | None:
    """The public name of something in TensorFlow's own modules."""
    for pattern, public in INTERNAL.items():
        module = pattern.removesuffix(".*")
        if not f"{full}.".startswith(f"{module}."):
            continue
        rest = full.removeprefix(module).split(".")[1:]
        if pattern.endswith(".*") and rest and not rest[0][0].isupper():
            rest = rest[1:]
        return ".".join([public, *rest])
    return None


def in_generation(name: str, generation: Generation | None) -> str:
    """The name that a program of this generation means.

    `tf.distribute` of TensorFlow 1.14 has the names of `tf.compat.v1.distribute`, and
    `tf.contrib.distribute` had those already in 1.13.
    """
    if generation is Generation.TF2:
        return _OF_KERAS.sub(r"tf.keras.\1", name)
    if name in _BY_NAME and generation in _BY_NAME[name]:
        return _BY_NAME[name][generation]
    if generation is not Generation.TF1 and not (
        generation is Generation.CONTRIB and name.startswith("tf.distribute")
    ):
        return name
    name = name.replace(*_COLLECTIVE)
    for module in ("tf.distribute", _CONTRIB):
        if f"{name}.".startswith(f"{module}."):
            rest = name.removeprefix(module)
            for place in (_V1, f"{_V1}.experimental"):
                if _known(place + rest):
                    return place + rest
    return name


def _known(name: str) -> bool:
    """Whether the table has it, or the class whose attribute it is."""
    parts = name.split(".")
    return any(
        (row := NAMES.get(".".join(parts[:end]))) is not None
        and (end == len(parts) or not row.exact)
        for end in range(len(parts), 3, -1)
    )
