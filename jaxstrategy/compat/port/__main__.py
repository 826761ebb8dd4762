"""`python -m jaxstrategy.compat.port`."""

import sys

from jaxstrategy._src.compat.port.libcst_extra import require_libcst
from jaxstrategy._src.errors import MissingExtraError

if __name__ == "__main__":
    try:
        require_libcst()
    except MissingExtraError as missing:
        sys.exit(f"error: {missing}")
    from jaxstrategy._src.compat.port.port_command import main

    sys.exit(main())
