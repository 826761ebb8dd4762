"""A Ray of this machine alone, for as long as the standard input stays open.

It is a process of its own, because Ray takes signals for itself, and starts others by
`fork`, which a process that uses JAX must not do. It runs without the package.
"""

import importlib
import sys


def main() -> None:
    """Start Ray, print its address, end it when the parent is gone."""
    ray = importlib.import_module("ray")
    started = ray.init(
        address="local",  # not one that somebody else has started here
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    print(started.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
