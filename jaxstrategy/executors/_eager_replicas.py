"""The block in which replicas run eagerly: `eager_replicas`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxstrategy.contexts import _context
from jaxstrategy.executors.replica_threads._eager_results import EagerMemory


@contextlib.contextmanager
def eager_replicas() -> Iterator[None]:
    """TODO"""
    with _context.entered(runs_eagerly=EagerMemory()):
        yield
