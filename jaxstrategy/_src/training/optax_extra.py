"""Optax, which is an extra: imported where it is used."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.text.shown import shown

if TYPE_CHECKING:
    from optax import GradientTransformation


def optax_for(function: str) -> ModuleType:
    """The module `optax`, for a function of `jaxstrategy.optax`."""
    try:
        import optax
    except ImportError as missing:
        raise MissingExtraError(
            f"`jaxstrategy.optax.{function}` needs Optax, which is not installed. "
            "Install the extra: pip install 'jaxstrategy[flax]'"
        ) from missing
    return optax


def check_transformation(name: str, given: GradientTransformation) -> None:
    """Raise unless this is a transformation of Optax."""
    # A dict has an `update`, too.
    if not all(callable(getattr(given, n, None)) for n in ("init", "update")):
        raise TypeError(
            f"`{name}` was {shown(given)}; a transformation of Optax was wanted: "
            "`optax.chain(...)`."
        )
