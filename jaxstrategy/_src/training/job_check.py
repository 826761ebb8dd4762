"""Checks the rendezvous and an all-reduce of a job: `launch --check` runs it.

Each process runs this. It says what was found, step by step, so that the last line
before an error tells what works.
"""

from __future__ import annotations

import os
import sys
import time

import jax
import numpy as np

from jaxstrategy._src.cluster.resolvers.environment import default_resolver
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.options import CommunicationOptions
from jaxstrategy._src.processes import job, rendezvous
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.strategies.mirrored import MultiWorkerMirroredStrategy
from jaxstrategy._src.text import plural

SECONDS = "JAXSTRATEGY_CHECK_SECONDS"
_DEFAULT_SECONDS = "30"


def main() -> int:
    """The exit code: 0 if all is well."""
    begun = time.monotonic()
    seconds = float(os.environ.get(SECONDS, _DEFAULT_SECONDS))
    try:
        _rendezvous(seconds, begun)
        right = _exchange(seconds)
    except (ClusterError, ValueError, OSError) as error:
        print(f"check: failed after {_since(begun)}: {error}", file=sys.stderr)
        return 1
    if right and jax.process_index() == 0:
        _say(f"all is well, after {_since(begun)}")
    return 0 if right else 1


def _rendezvous(seconds: float, begun: float) -> None:
    resolver = default_resolver()
    process = None if resolver is None else resolver.process()
    if process is None:
        raise ClusterError(
            "nothing says which processes there are: start the check with "
            "`python -m jaxstrategy.launch -n 2 --check`, or set TF_CONFIG."
        )
    processes = job.start(process, timeout_seconds=seconds, start_seconds=seconds)
    facts = rendezvous.facts()
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    devices = jax.local_devices()
    noun = plural(len(devices), "device")
    told = f"{len(devices)} {devices[0].platform} {noun}"
    replies = processes.agreement("check: devices").exchange(told, seconds)
    if processes.index == 0:
        _say(f"{processes.count} processes met in {_since(begun)}, with {versions}")
        for member, devices in zip(processes.store.members, replies, strict=True):
            _say(f"{member}: {devices}")


def _exchange(seconds: float) -> bool:
    options = CommunicationOptions(timeout_seconds=seconds)
    strategy = MultiWorkerMirroredStrategy(communication_options=options)
    replicas = strategy.num_replicas_in_sync
    ones = strategy.per_replica(np.arange(replicas, dtype=np.float32))
    times = []
    total = 0.0
    for _ in range(2):
        begun = time.monotonic()
        total = float(strategy.run(_sum, (ones,)))
        times.append(_since(begun))
    wanted = replicas * (replicas - 1) / 2
    if strategy.process_index == 0:
        _say(
            f"a sum over {replicas} replicas is {total:g}, {wanted:g} was wanted; the "
            f"first took {times[0]}, with compiling, the next {times[1]}"
        )
    return total == wanted


def _sum(x: jax.Array) -> jax.Array:
    return get_replica_context().all_reduce("sum", x)


def _since(begun: float) -> str:
    return f"{time.monotonic() - begun:.3f} s"


def _say(text: str) -> None:
    print(f"check: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
