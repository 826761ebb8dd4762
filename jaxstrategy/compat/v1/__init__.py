"""Names of TensorFlow 1."""

from typing import NoReturn

from jaxstrategy.compat.v1 import experimental as experimental
from jaxstrategy.text import _absent


def __getattr__(name: str) -> NoReturn:
    """Names of TensorFlow that are not here say what to use instead."""
    raise _absent.missing(__name__, name)
