"""Coordinators whose workers are threads, and functions that each of them has run."""

import contextlib
import time

import jaxstrategy as js

SECONDS = 60


@contextlib.contextmanager
def coordinated(workers, devices=1, servers=1):
    """A coordinator of workers that are threads, closed afterwards."""
    js.simulate(8)
    backend = js.coordinator.Threads(workers, servers, devices)
    strategy = js.ParameterServerStrategy(backend=backend)
    coordinator = js.coordinator.ClusterCoordinator(strategy)
    try:
        yield coordinator
    finally:
        strategy.close()


def until_each_has(coordinator, fn, args=(), workers=None):
    """What `fn` returned, worker by worker, once each of them has run it.

    It returns its worker's index, and something else.
    """
    found = {index: [] for index in range(workers or len(coordinator.workers))}
    end = time.monotonic() + SECONDS
    while not all(found.values()):
        assert time.monotonic() < end, f"some workers have run nothing: {found}"
        values = [coordinator.schedule(fn, args) for _ in found]
        for index, value in coordinator.fetch(values):
            found[int(index)].append(value)
    coordinator.join()
    return found


def until_so_many(coordinator, fn, args, count):
    """What `fn` returned so often; where an iterator had ended does not count."""
    found, end = [], time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < end, f"there are no more than {found}"
        value = coordinator.schedule(fn, args)
        try:
            coordinator.join()
        except js.OutOfRangeError:
            continue
        found.append(value.fetch())
    return found
