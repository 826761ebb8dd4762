"""What the processes of a job say to each other in eager steps: `AgreedRounds`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast, final

from jaxstrategy.processes._agreement import Operation, users_line
from jaxstrategy.processes._job import Processes
from jaxstrategy.replicas._replicas import Replicas

_ADVICE = (
    "The replicas of all processes must call the same collectives in the same order, "
    "and all processes must be in `eager_replicas()`, or none."
)


@final
class AgreedRounds:
    """What replicas of several processes do next, compared before they do it.

    Args:
      processes: those that take the steps together; None for this one alone.
      replicas: of all of them.
    """

    def __init__(self, processes: Processes | None, replicas: Replicas) -> None:
        several = processes is not None and processes.count > 1
        self._processes = processes if several else None
        self._replicas = replicas
        self._name = ""

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A `with` block in which a step of this name is taken."""
        self._name = name
        self.agree("the beginning of an eager step")
        yield

    def agree(self, what: str) -> None:
        """Says what the replicas of this process do next.

        Raises:
          ClusterError: those of another process do something else.
        """
        if self._processes is not None:
            self._compare(what, None)

    def digests(self, own: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """What the replicas of all processes have, of what those of this one have."""
        if self._processes is None:
            return own
        numbered = [
            [i, *each] for i, each in zip(self._replicas.own, own, strict=False)
        ]
        heard = self._compare("the results of an eager step", cast("object", numbered))
        rows = [row for said in heard for row in cast("list[list[str]]", said)]
        return [row[1:] for row in sorted(rows, key=lambda row: int(row[0]))]

    def _compare(self, what: str, said: object) -> list[object]:
        assert self._processes is not None
        operation = Operation(f"{what} in `{self._name}`", users_line())
        compare = self._processes.operations.compare
        return list(compare(operation, _ADVICE, said))
