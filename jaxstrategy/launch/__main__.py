"""`python -m jaxstrategy.launch`: runs the job that the command line describes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
from collections.abc import Iterator, Sequence

from jaxstrategy._src.errors import ClusterError, MissingExtraError
from jaxstrategy._src.launch import clusters
from jaxstrategy._src.launch.child_process import signal_name
from jaxstrategy._src.launch.local import Events, Job, RoleJob, ThisMachine
from jaxstrategy._src.launch.options import Options, parse
from jaxstrategy._src.launch.ray import RayMachines

_PRINTED = {"slurm": clusters.script, "k8s": clusters.manifest}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = parse(arguments)
    if options.print_for:
        return _print(options.print_for, options)
    events: Events = queue.SimpleQueue()
    with _signals_to(events):
        try:
            if options.on == "ray":
                with contextlib.closing(RayMachines(options, events)) as machines:
                    return Job(options, events, machines).run()
            with contextlib.closing(ThisMachine(options, events)) as machine:
                if options.workers is not None:
                    return RoleJob(options, events, machine).run()
                return Job(options, events, machine).run()
        except (ClusterError, MissingExtraError) as error:
            return _not_started(error, events)


def _not_started(error: Exception, events: Events) -> int:
    """Say why no process runs; the exit code."""
    if events.empty():
        print(f"jaxstrategy.launch: error: {error}", file=sys.stderr)
        return 1
    number = events.get()
    assert isinstance(number, int)  # no worker was there that could have ended
    print(f"jaxstrategy.launch: stopped by {signal_name(number)}", file=sys.stderr)
    return 128 + number


def _print(kind: str, options: Options) -> int:
    """Print what a cluster needs; the exit code."""
    try:
        text = _PRINTED[kind](options)
    except (ValueError, MissingExtraError) as error:
        print(f"jaxstrategy.launch: error: {error}.", file=sys.stderr)
        return 2
    # As bytes, since arguments need not be text: they come out as they came in.
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()
    return 0


@contextlib.contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """Make events of SIGINT and SIGTERM; gives back the old handlers."""
    old = {
        number: signal.signal(number, lambda number, _: events.put(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
