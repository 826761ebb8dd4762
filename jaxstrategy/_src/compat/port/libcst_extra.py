"""LibCST, which is an extra: imported where it is used."""

from __future__ import annotations

from jaxstrategy._src.errors import MissingExtraError


def require_libcst() -> None:
    """Raises unless LibCST is installed."""
    try:
        import libcst
    except ImportError as missing:
        raise MissingExtraError(
            "`jaxstrategy.compat.port` needs LibCST, which is not installed. "
            "Install the extra: pip install 'jaxstrategy[port]'"
        ) from missing
    del libcst
