"""`python -m jaxstrategy.compat.port`."""

import sys

if __name__ == "__main__":
    try:
        import libcst  # noqa: F401 - the extra
    except ImportError:
        sys.exit(
            "error: `jaxstrategy.compat.port` needs LibCST, which is not installed. "
            "Install the extra: pip install 'jaxstrategy[port]'"
        )
    from jaxstrategy._src.compat.port.rewriting import main

    sys.exit(main())
