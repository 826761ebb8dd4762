"""Versions of installed packages."""

from importlib import metadata


def version_of(name: str) -> str:
    """The version of a package; a source tree that is not installed has none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = version_of("jaxstrategy")
