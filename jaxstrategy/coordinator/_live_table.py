"""A table of the workers that changes while they work: `LiveTable`."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, TypeAlias, final

from jaxstrategy.coordinator._scheduler import Scheduler
from jaxstrategy.coordinator._worker_states import HEADER

Console: TypeAlias = Any
"""A `rich.console.Console`; rich may be missing."""

_PER_SECOND = 4


@final
class LiveTable:
    """The states of the workers, drawn while a `with` block runs.

    Drawn by rich, in a terminal or a notebook; elsewhere, and without rich, nothing is
    drawn. Made by `ClusterCoordinator.progress`.
    """

    def __init__(
        self, scheduler: Scheduler, description: str = "", console: Console = None
    ) -> None:
        self._scheduler = scheduler
        self._description = description
        self._console = console
        self._live: Any = None
        self._began = (0.0, 0)

    def __enter__(self) -> LiveTable:
        """Begin to draw."""
        self._began = time.monotonic(), self._finished()
        with contextlib.suppress(ImportError):
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the table as it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __str__(self) -> str:
        """How much is done, and how fast."""
        began, before = self._began
        done = self._finished() - before
        seconds = time.monotonic() - began
        rate = f", {done / seconds:,.3g} functions/s" if began and seconds else ""
        counts = f"{self._scheduler.queued} queued, {self._scheduler.running} running"
        text = f"{done} finished, {counts}{rate}"
        return f"{self._description}: {text}" if self._description else text

    def _finished(self) -> int:
        return sum(state.functions for state in self._scheduler.states)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.live import Live

        console = self._console
        if console is None:
            console = Console(stderr=True, file=sys.stderr)
        if not (console.is_terminal or console.is_jupyter):
            return
        live = Live(
            get_renderable=self._table, console=console, refresh_per_second=_PER_SECOND
        )
        with contextlib.suppress(LiveError):  # an older rich cannot draw two
            live.start(refresh=True)
            self._live = live

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(*HEADER, title=str(self), title_justify="left")
        for state in self._scheduler.states:
            table.add_row(*state.row())
        return table
