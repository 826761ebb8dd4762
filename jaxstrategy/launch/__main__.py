"""`python -m jaxstrategy.launch`."""

import sys

from jaxstrategy.launch._main import main

if __name__ == "__main__":
    sys.exit(main())
