"""`python -m jaxstrategy.doctor`."""

import sys

from jaxstrategy._src.doctor import main

if __name__ == "__main__":
    sys.exit(main())
