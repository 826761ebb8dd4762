"""`python -m jaxstrategy.demo`."""

import sys

from jaxstrategy._src.demo import main
from jaxstrategy._src.errors import MissingExtraError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except MissingExtraError as missing:
        sys.exit(str(missing))
