"""Flax layers and helpers that know the replicas of the current strategy.

`linen.BatchNorm` and `nnx.BatchNorm` take the place of Flax's own. Their statistics are
those of the global batch: no axis name is typed, and the same model works under every
strategy, in `model.init`, and with no strategy at all.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.flax._statistics import average_statistics as average_statistics
from jaxstrategy.flax._statistics import axis_name as axis_name

if TYPE_CHECKING:
    from jaxstrategy.flax import linen as linen
    from jaxstrategy.flax import nnx as nnx


def __getattr__(name: str) -> ModuleType:
    """`linen` and `nnx`, which import Flax, when they are first asked for."""
    if name not in ("linen", "nnx"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "flax":
            raise
        raise MissingExtraError(
            f"`jaxstrategy.flax.{name}` needs Flax, which is not installed. Install "
            "the extra: pip install 'jaxstrategy[flax]'"
        ) from missing


def __dir__() -> list[str]:
    return sorted([*globals(), "linen", "nnx"])
