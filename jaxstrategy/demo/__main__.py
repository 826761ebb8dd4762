"""`python -m jaxstrategy.demo`."""

import sys

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.demo._demo import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except MissingExtraError as missing:
        sys.exit(str(missing))
