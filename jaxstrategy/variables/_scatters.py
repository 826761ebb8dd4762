"""Changes of some rows of a variable: `scatter_add` and its kin."""

from __future__ import annotations

import abc
from typing import Any

from jaxstrategy._slices import IndexedSlices
from jaxstrategy.variables._changes import SCATTERS, Change


class Scatters(abc.ABC):
    """Methods that change some rows of a mirrored or ordinary variable.

    In `run`, the rows of all replicas count if the variable has an aggregation: for
    MEAN their values are divided by the number of replicas first, for
    ONLY_FIRST_REPLICA they are the first replica's. With NONE the rows must be equal on
    all replicas. Outside `run`, and in `merge_call`, they count once.
    """

    @abc.abstractmethod
    def _scatter(self, rows: IndexedSlices, change: Change) -> Any:
        """Change these rows; returns the new value."""

    def scatter_add(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Add rows to those of the variable.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["add"])

    def scatter_sub(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Subtract rows from those of the variable.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["sub"])

    def scatter_mul(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Multiply rows of the variable by others.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["mul"])

    def scatter_div(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Divide rows of the variable by others; integers keep what is whole.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["div"])

    def scatter_min(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Make rows of the variable the smaller of both.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read, or has aggregation SUM or MEAN.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["min"])

    def scatter_max(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Make rows of the variable the larger of both.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read, or has aggregation SUM or MEAN.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["max"])

    def scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Put rows in the place of those of the variable.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read, or has aggregation SUM or MEAN.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["update"])
