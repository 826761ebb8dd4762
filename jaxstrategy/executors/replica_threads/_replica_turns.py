"""The replicas of one eager step, which take turns: `ReplicaTurns`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from jaxstrategy._errors import DivergentCollectiveError, LateReplicaWarning
from jaxstrategy.executors.replica_threads._replica_thread import (
    MergeCall,
    MetArrays,
    ReplicaThread,
    Wanted,
)
from jaxstrategy.text import _user_code
from jaxstrategy.text._lists import listed

# After so long a replica that runs is named, once; Ctrl-C is heard at once.
PATIENCE_SECONDS = 10.0

_DEBUGGERS = ("bdb", "pdb", "cmd", "pudb", "debugpy", "pydevd", "ipdb")


@final
class ReplicaTurns:
    """The replicas of one eager step: each runs until it waits for all the others.

    Args:
      name: of the step.
      threads: the replicas of this process, in their order.
      answer: does what all of them wait for; returns what each of them gets.
      agree: says to the other processes what this one does next; raises if they do
        something else.
    """

    def __init__(
        self,
        name: str,
        threads: Sequence[ReplicaThread],
        answer: Callable[[Sequence[Wanted]], Sequence[object]],
        agree: Callable[[str], None],
    ) -> None:
        self._name = name
        self._threads = threads
        self._answer = answer
        self._agree = agree
        self._is_told = False

    def run(self) -> None:
        """Runs all replicas to their ends.

        Raises:
          DivergentCollectiveError: some wait where the others do not.
          BaseException: what a replica has raised.
        """
        try:
            replies: Sequence[object] = [None] * len(self._threads)
            refusal = None
            while not self._round(replies, refusal):
                wanted = [thread.wanted for thread in self._threads]
                self._agree(_told(wanted[0]))
                try:
                    found = self._answer([each for each in wanted if each is not None])
                    replies, refusal = found, None
                except Exception as error:
                    refusal = error
                    error.add_note(self._met_note())
            self._agree("the end of the step")
        finally:
            for thread in self._threads:
                thread.give_up()
            for thread in self._threads:
                thread.join()

    def _round(self, replies: Sequence[object], refusal: BaseException | None) -> bool:
        """One turn of each replica; whether all have returned."""
        for thread in self._threads:
            thread.wanted = None
        for thread, reply in zip(self._threads, replies, strict=True):
            thread.begin_turn(reply, refusal)
            self._wait_for(thread)
            if thread.error is not None:
                self._raise(thread, thread.error, thread.error is refusal)
        waiting = [thread for thread in self._threads if not thread.is_ended]
        if not waiting:
            return True
        if len(waiting) < len(self._threads) or not _are_alike(waiting):
            self._tell_others("replicas that do not meet")
            raise self._uneven(waiting)
        return False

    def _wait_for(self, thread: ReplicaThread) -> None:
        self._end_of_turn(thread)
        while thread.request is not None:
            try:
                reply, refusal = thread.request(), None
            except Exception as error:
                reply, refusal = None, error
            thread.begin_turn(reply, refusal)
            self._end_of_turn(thread)

    def _end_of_turn(self, thread: ReplicaThread) -> None:
        while not thread.end_turn(PATIENCE_SECONDS):
            frames = thread.frames
            if is_in_debugger(frames) or self._is_told:
                continue
            self._is_told = True
            line = _user_code.innermost([(file, number) for file, number, _ in frames])
            others = [each for each in self._threads if each.wanted is not None]
            _user_code.warn(
                f"Replica {thread.number} of `{self._name}` has run for "
                f"{PATIENCE_SECONDS:g} s and has not come to a collective, nor to its "
                f"end. It is at\n  {line}\n{_waits(others)}",
                LateReplicaWarning,
            )

    def _raise(self, thread: ReplicaThread, error: BaseException, met_it: bool) -> None:
        self._tell_others(f"{type(error).__name__} in replica {thread.number}")
        if not met_it:
            others = [each for each in self._threads if each.wanted is not None]
            error.add_note(
                f"Replica {thread.number} of `{self._name}` raised this, in "
                f"`eager_replicas()`. {_waits(others)}".rstrip()
            )
        raise error

    def _tell_others(self, what: str) -> None:
        try:
            self._agree(what)
        except Exception:
            pass  # theirs is another: what happened here is raised here

    def _met_note(self) -> str:
        first = self._threads[0]
        assert first.wanted is not None, "all wait"
        return (
            f"All replicas of `{self._name}` had met, in `eager_replicas()`, at "
            f"{_told(first.wanted)}: {first.line}"
        )

    def _uneven(self, waiting: Sequence[ReplicaThread]) -> DivergentCollectiveError:
        counted = [each for each in waiting if isinstance(each.wanted, MergeCall)]
        numbers = "have a different number of merge_call() calls"
        what = numbers if counted else "do not meet at the same collective"
        lines = "\n".join(f"  {_where(thread)}" for thread in self._threads)
        return DivergentCollectiveError(
            f"The replicas of `{self._name}` {what}; compiled, or in several "
            f"processes, they would wait for each other for ever:\n{lines}\n"
            "All replicas must call the same collectives in the same order, with "
            "arrays of the same shapes and dtypes. Take the call out of what depends "
            "on the replica, and choose the value instead.",
            collective_line=str(waiting[0].line),
        )


def is_in_debugger(frames: Sequence[tuple[str, int, str]]) -> bool:
    """Whether a debugger has stopped the thread that is in these frames."""
    modules = {module.partition(".")[0] for _, _, module in frames}
    return not modules.isdisjoint(_DEBUGGERS)


def _are_alike(threads: Sequence[ReplicaThread]) -> bool:
    first = threads[0].wanted
    for thread in threads[1:]:
        other = thread.wanted
        if isinstance(first, MetArrays) and isinstance(other, MetArrays):
            if not first.is_like(other):
                return False
        elif type(first) is not type(other):
            return False
    return True


def _told(wanted: Wanted | None) -> str:
    return "nothing" if wanted is None else wanted.told


def _where(thread: ReplicaThread) -> str:
    if thread.wanted is not None:
        return f"replica {thread.number} waits at {thread.wanted.told}: {thread.line}"
    met = "without any" if thread.line is None else f"after that at {thread.line}"
    return f"replica {thread.number} has returned, {met}"


def _waits(threads: Sequence[ReplicaThread]) -> str:
    if not threads:
        return ""
    who = listed([str(thread.number) for thread in threads], 8)
    first = threads[0]
    verb = "Replica {} waits" if len(threads) == 1 else "Replicas {} wait"
    return f"{verb.format(who)} at {_told(first.wanted)}: {first.line}"
