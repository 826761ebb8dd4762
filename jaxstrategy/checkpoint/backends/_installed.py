"""The backend that is installed."""

from __future__ import annotations

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.checkpoint.backends._backend import AbstractBackend


def installed() -> AbstractBackend:
    """A backend that writes with Orbax.

    Raises:
      MissingExtraError: Orbax is not installed.
    """
    try:
        from jaxstrategy.checkpoint.backends._orbax_backend import OrbaxBackend
    except ImportError as missing:
        raise MissingExtraError(
            "`jaxstrategy.checkpoint` needs Orbax, which is not installed. Install the "
            "extra: pip install 'jaxstrategy[checkpoint]'"
        ) from missing
    return OrbaxBackend()
