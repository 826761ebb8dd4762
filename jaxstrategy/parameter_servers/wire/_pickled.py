"""Objects that have no raw form, for streams whose other end is of the job."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jaxstrategy._errors import MissingExtraError


def dumped(value: object) -> tuple[bytes, list[np.ndarray]]:
    """An object as bytes, with large buffers of it apart.

    Raises:
      MissingExtraError: cloudpickle is needed for it, and not installed.
      Exception: it cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    blob = _cloudpickle().dumps(value, 5, buffers.append)
    return blob, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def dumped_plainly(value: object) -> tuple[bytes, list[np.ndarray]]:
    """As `dumped`, of an object whose class both sides import: without cloudpickle."""
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return blob, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def loaded(blob: bytes, arrays: Sequence[np.ndarray]) -> Any:
    """The object again. This runs whatever its sender wants to be run."""
    return pickle.loads(blob, buffers=arrays)


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        raise MissingExtraError(
            "Functions and datasets are sent to workers in other processes by "
            "cloudpickle, which is not installed: pip install "
            "'jaxstrategy[coordinator]'"
        ) from None
    return cloudpickle
