"""`python -m jaxstrategy.doctor`."""

import sys

from jaxstrategy.doctor._doctor import main

if __name__ == "__main__":
    sys.exit(main())
