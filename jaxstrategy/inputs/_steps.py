"""The batches of one pass, agreed between all processes, so that they end together."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Self

from jaxstrategy.inputs import _division
from jaxstrategy.inputs._host_batch import HostBatch
from jaxstrategy.inputs._reader import Reader
from jaxstrategy.inputs.sources._source import State
from jaxstrategy.processes._agreement import Agreement

_VERSION = 2  # of states

# Of so many steps at once the processes agree at most, times replicas.
_MOST_AHEAD = 1 << 16

# Said of a batch no row of which is missing.
_FULL = 0


def _runs(counts: list[list[int]]) -> list[list[Any]]:
    """Equal neighbours as one, with their number.

    >>> _runs([[2, 2], [2, 2], [2, 1]])
    [[2, [2, 2]], [1, [2, 1]]]
    """
    return [[len(list(run)), key] for key, run in itertools.groupby(counts)]


class Steps:
    """The batches of one pass, step by step.

    Args:
      reader: what this process reads.
      agreement: with the others.
      remainder: what is done with a step some of whose rows are missing.

    Attributes:
      done: how many batches were agreed about.
    """

    def __init__(self, reader: Reader, agreement: Agreement, remainder: str) -> None:
        self.reader = reader
        self.agreement = agreement
        self._remainder = remainder
        self.done = 0
        self._each: int | None = None
        self._last: HostBatch | None = None
        # How many replicas each process feeds, once all have said it.
        self._own_replicas: list[int] = []
        # The real rows of all replicas in steps that were agreed about ahead.
        self._counts_ahead: collections.deque[list[int]] = collections.deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HostBatch:
        while True:
            with self.agreement.reading(self.name_of(self.done)):
                batch = self.reader.read()
            step = self._agreed(batch)
            if step.is_full:
                return step
            if self._is_filled_up(step):
                self._check_rows_are_told(step)
                return step
            self._refuse(step.counts, step.each)

    def _is_filled_up(self, step: HostBatch) -> bool:
        """Whether a step some of whose rows are missing is taken all the same."""
        has_all = self._remainder == "drop_empty" and min(step.counts) > 0
        return has_all or self._remainder == "pad"

    def _refuse(self, counts: Sequence[int], each: int) -> None:
        """Raise for a step some of whose rows are missing, if it is not left out.

        Args:
          counts: how many real rows each of all replicas has.
          each: how many were wanted.

        Raises:
          ValueError: missing rows are an error; or each step would be left out.
        """
        if self._remainder == "error":
            raise ValueError(
                f"Step {self.done - 1} has {sum(counts)} rows where "
                f"{each * len(counts)} were wanted, {each} for each of {len(counts)} "
                "replicas. Use a global batch size that the replicas can share "
                "equally, and leave out an incomplete last batch; or choose "
                '`InputOptions(remainder="pad")` or `"drop"`.'
            )
        # Of elements for single replicas, the last ones may be too few.
        is_end = self._remainder == "drop_empty" and self.reader.is_for_one
        if self.done == 1 and not is_end:
            raise ValueError(
                f"The first batch has {sum(counts)} rows, which {len(counts)} "
                "replicas cannot share equally, so that "
                f'`remainder="{self._remainder}"` would leave out each batch. Use a '
                f"global batch size divisible by {len(counts)}."
            )

    def name_of(self, number: int) -> str:
        """The name of a batch in all processes: `batch 3 of input 0`."""
        return f"batch {number} of {self.agreement.topic}"

    def _check_rows_are_told(self, step: HostBatch) -> None:
        """Raises if a replica has only scalars and no batch, which no mask can tell."""
        kind = self.reader.kind
        if kind is not None and all(shape is None for shape, _ in kind.types):
            without = [str(i) for i, count in enumerate(step.counts) if not count]
            raise ValueError(
                f"In step {self.done - 1} there is no element for replicas "
                f"{', '.join(without)}, and scalars have no rows that could be told "
                "from real ones. Make arrays of one row of them, `[1]`, which are "
                'masked; or choose `InputOptions(remainder="drop")`.'
            )

    def _agreed(self, batch: HostBatch | None) -> HostBatch:
        if self._counts_ahead:
            counts = self._counts_ahead.popleft()
            batch = self._as_announced(batch, counts)
        else:
            heard = self._heard(batch)
            if not any(heard):
                if self.done == 0:
                    raise ValueError(
                        "The dataset has no batches. A generator that was read before "
                        "has none left: give a list, or a function that makes "
                        "generators."
                    )
                raise StopIteration
            batch = batch or self._filling()
            if len({said[0] for said in heard if said}) > 1:
                batch = self._widened(batch, heard)
            elif all(heard):
                self._agree_ahead(heard)
            none = [0] * len(batch.own_counts)
            counts = [n for said in heard for n in (said[1] if said else none)]
        self._last, self._each = batch, batch.each
        self.done += 1
        return dataclasses.replace(
            batch,
            counts=tuple(counts),
            state=self.state(),
            is_padded=self._remainder in ("pad", "drop_empty"),
        )

    def _heard(self, batch: HostBatch | None) -> list[list[Any] | None]:
        """Of each process: rows of a replica, own counts, and those ahead in runs.

        None of one that has no batch left.
        """
        heard = self.agreement.exchange(self._said(batch))
        if all(isinstance(said, list) for said in heard):
            self._own_replicas = [len(said[1]) for said in heard]
        return [
            [self._each, [self._each] * self._own_replicas[process], []]
            if said == _FULL
            else said
            for process, said in enumerate(heard)
        ]

    def _said(self, batch: HostBatch | None) -> Any:
        if batch is None:
            return None
        counts, ahead = list(batch.own_counts), []
        if self.agreement.topic is not None:
            most = max(_MOST_AHEAD // self.reader.replicas.total, 1)
            ahead = _runs(self.reader.counts_ahead(most))
        # What each process says goes to all others, so that the usual is short.
        if self._own_replicas and not ahead and set(counts) == {batch.each}:
            return _FULL
        return [batch.each, counts, ahead]

    def _agree_ahead(self, heard: list[Any]) -> None:
        """Take note of the steps that all processes are sure of already."""
        own = [[run[1] for run in said[2] for _ in range(run[0])] for said in heard]
        for step in zip(*own, strict=False):
            self._counts_ahead.append([count for counts in step for count in counts])

    def _as_announced(self, batch: HostBatch | None, counts: list[int]) -> HostBatch:
        """Raises if a batch is not the one that the other processes were told of."""
        first, local = self.reader.replicas.first, self.reader.replicas.local
        own = tuple(counts[first : first + local])
        if batch is None or batch.own_counts != own:
            found = "is missing" if batch is None else f"has {batch.own_counts} rows"
            raise ValueError(
                f"Step {self.done} {found}, where the other processes count on {own} "
                "of the replicas here. The dataset was changed while it was read: give "
                "one that stays as it is, or a function that makes generators."
            )
        return batch

    def _widened(self, batch: HostBatch, heard: list[Any]) -> HostBatch:
        """`batch` with as many rows as the largest in any process, in the first step.

        Raises:
          ValueError: the processes went on from states that do not belong together.
        """
        if self._each is not None:
            told = ", ".join(
                f"{found[0]} in process {index}"
                for index, found in enumerate(heard)
                if found is not None
            )
            raise ValueError(
                f"The replicas' batches have different sizes: {told} rows. Resume all "
                "processes from states that were saved after the same step."
            )
        each = max(found[0] for found in heard if found is not None)
        self.reader.set_each(each)
        arrays = _division.widened(batch.arrays, each)
        return dataclasses.replace(batch, arrays=arrays, each=each)

    def _filling(self) -> HostBatch:
        """A batch without real rows, for a process that has read all of its own."""
        last = self._last
        if last is None:
            raise ValueError(
                "The input pipeline of this process has no batches, but another one's "
                "has. Give each process at least one batch."
            )
        return dataclasses.replace(last, own_counts=(0,) * len(last.own_counts))

    def state(self) -> State | TypeError:
        """The place of the pass, for `set_state`; or why that cannot be said."""
        try:
            sources = self.reader.get_state()
        except TypeError as error:
            return error
        return {
            "version": _VERSION,
            "steps": self.done,
            "batches": self.reader.number,
            "rows": self._each,
            "replicas": self.reader.replicas.total,
            "prints": [self.reader.prints.get(i) for i in range(len(sources))],
            "sources": sources,
        }

    def set_state(self, state: State) -> None:
        """Goes on from a state.

        Raises:
          ValueError: it is not one of ours, or of another dataset.
          TypeError: the source cannot be resumed.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise ValueError(
                f"`set_state` was given {state!r}, which `get_state` of a distributed "
                "iterator did not make."
            )
        each, total = state["rows"], self.reader.replicas.total
        if each is not None and state["replicas"] != total:
            each = -(-each * state["replicas"] // total)  # of the same global batch
        self.reader.set_each(each)
        if state["steps"] and not self.reader.replicas.are_all:
            # Before the state is set, which the reading would move on from.
            self._last = self.reader.read()  # to fill up with, if it is at its end
        self.reader.set_state(state["sources"], state["batches"], state["prints"])
        self.done, self._each = state["steps"], each
