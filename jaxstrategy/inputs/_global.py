"""Global batches, of which each process has its part."""

from __future__ import annotations

from typing import final

from jaxstrategy.inputs._division import Division, ReplicaRange, stacked
from jaxstrategy.inputs._host_batch import HostBatch
from jaxstrategy.inputs._reader import Reader
from jaxstrategy.inputs.sources._source import Pass


@final
class GlobalReader(Reader):
    """Reads from a source that gives all processes the same batches.

    Args:
      source: one pass over it.
      replicas: those of this process get the rows that are theirs.
    """

    def __init__(self, source: Pass, replicas: ReplicaRange) -> None:
        super().__init__(replicas)
        self._source = source
        self._division: Division | None = None

    @property
    def passes(self) -> list[Pass]:
        """One."""
        return [self._source]

    def set_each(self, each: int | None) -> None:
        """Sets the rows of each replica, before a batch tells them."""
        self._division = None if each is None else Division(self.replicas, each)

    def read(self) -> HostBatch | None:
        """This process's rows of the next batch.

        Raises:
          ValueError: it has more rows than the first, and there are several replicas.
        """
        number = self.number
        try:
            part = self._source.part(lambda rows: self._divided(rows, number).own(rows))
            if part is None:
                batch = self._next(next(self._source))
                rows = batch.rows
                if rows:
                    batch = batch.cut(self._divided(rows, number).own(rows))
            else:
                rows, batch = part[0], self._next(part[1], is_part=True)
        except StopIteration:
            return None
        if not rows and not self.replicas.is_one:
            batch = self.filling(number)
        division = self._divided(rows, number)
        first, local = self.replicas.first, self.replicas.local
        return HostBatch(
            arrays=stacked(batch, local, self.replicas.filled(rows, division.each)),
            own_counts=tuple(division.counts(rows)[first : first + local]),
            each=division.each,
            are_own=self._source.are_own,
        )

    def counts_ahead(self, most: int) -> list[list[int]]:
        """Those of the rows that the source is sure of."""
        division, found = self._division, []
        first, local = self.replicas.first, self.replicas.local
        for rows in self._source.rows_ahead(most):
            if division is None or not 0 < rows <= division.rows:
                break
            found.append(division.counts(rows)[first : first + local])
        return found

    def _divided(self, rows: int, number: int) -> Division:
        if self._division is None:
            if not rows:
                self.filling(number)  # says that there is none
            self._division = Division.of(self.replicas, rows)
        if rows > self._division.rows and not self.replicas.is_one:
            raise ValueError(
                f"Batch {number} has {rows} rows, but the batches before had at "
                f"most {self._division.rows}. Shapes are static: all batches but "
                "smaller ones, such as the last, need the size of the first."
            )
        return self._division
