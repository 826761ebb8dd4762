"""`python -m jaxstrategy.compat.port`."""

import sys

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.compat.port._libcst_extra import require_libcst

if __name__ == "__main__":
    try:
        require_libcst()
    except MissingExtraError as missing:
        sys.exit(f"error: {missing}")
    from jaxstrategy.compat.port._port_command import main

    sys.exit(main())
