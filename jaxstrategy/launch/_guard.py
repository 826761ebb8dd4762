"""A small process that outlives the launcher, to leave no worker behind.

It prints its own number. It is told on its standard input which process groups there
are: `+123` of a new one, `-123` of one that is over. The input's end means that the
launcher is gone, however it went, and whatever is left is killed. It runs without the
package.
"""

import os
import signal
import sys


def main() -> None:
    """Read until the launcher is gone, then kill what it has left."""
    # Ray kills the children of a worker that ends (2.60), so this is no child of it.
    if os.fork():
        return
    print(os.getpid(), flush=True)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended already


if __name__ == "__main__":
    main()
