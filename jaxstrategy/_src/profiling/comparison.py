"""Many replicas compared with one: `compare`, and its `Comparison`."""

from __future__ import annotations

import dataclasses
import os
import statistics
import textwrap
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar, final

import jax

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import checked_core
from jaxstrategy._src.text import at_least, positive, with_noun, with_seconds
from jaxstrategy._src.values.arrays import PyTree

S = TypeVar("S", bound=AbstractStrategy)
Make: TypeAlias = Callable[[S, int], Callable[[], PyTree]]


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The time of a step on many replicas and on one. Prints as sentences.

    Attributes:
      replicas: how many there are.
      examples: of one step, on all of them.
      whole: the seconds that one replica needs for all examples.
      part: the seconds that it needs for as many as one of the replicas gets.
      all: the seconds that the replicas need.
      note: why the times say less than they seem to; empty if there is no reason.

    >>> import jaxstrategy as js
    >>> found = js.profiling.Comparison(4, 64, whole=8e-3, part=3e-3, all=4e-3)
    >>> found.speedup, found.efficiency
    (2.0, 0.5)
    >>> print(found)
    4 replicas take 4 ms for a step of 64 examples, one takes 8 ms: 2 times as fast,
      50% of what 4 could be.
      small batch: 1 ms: 16 examples take one replica 3 ms, and a quarter of 8 ms
        would be 2 ms.
      communication: 1 ms: 4 replicas take longer than one with its 16 examples.
    """

    replicas: int
    examples: int
    whole: float
    part: float
    all: float
    note: str = ""

    @property
    def speedup(self) -> float:
        """The time of one replica by that of all, for the same examples."""
        return self.whole / self.all

    @property
    def efficiency(self) -> float:
        """The `speedup` by the number of replicas; 1 is all that can be had."""
        return self.speedup / self.replicas

    @property
    def small_batch(self) -> float:
        """The seconds lost because a part of the batch takes more than its share."""
        return max(self.part - self.whole / self.replicas, 0.0)

    @property
    def communication(self) -> float:
        """The seconds that replicas need more than one that has its part only.

        They exchange data, wait for each other, and may share cores or memory.
        """
        return max(self.all - self.part, 0.0)

    def __str__(self) -> str:
        n, times = self.replicas, self.speedup
        all_, whole, part = map(with_seconds, (self.all, self.whole, self.part))
        own = with_noun(self.examples // n, "example")
        fraction = {2: "half", 4: "a quarter"}.get(n, f"1/{n}")
        lines = [
            f"{with_noun(n, 'replica')} take {all_} for a step of "
            f"{with_noun(self.examples, 'example')}, one takes {whole}: {times:.3g} "
            f"times as fast, {self.efficiency:.0%} of what {n} could be."
        ]
        if self.small_batch:
            lines.append(
                f"small batch: {with_seconds(self.small_batch)}: {own} take one "
                f"replica {part}, and {fraction} of {whole} would be "
                f"{with_seconds(self.whole / n)}."
            )
        if self.communication:
            lines.append(
                f"communication: {with_seconds(self.communication)}: {n} replicas take "
                f"longer than one with its {own}."
            )
        lines += [self.note] if self.note else []
        indents = ["", *["  "] * (len(lines) - 1)]
        return "\n".join(
            textwrap.fill(
                line, 80, initial_indent=begin, subsequent_indent=f"{begin}  "
            )
            for begin, line in zip(indents, lines, strict=True)
        )

    __repr__ = __str__


def compare(
    make: Make[S],
    one: S,
    many: S,
    *,
    examples: int,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """The time of the same step on one replica and on many.

    Three steps are made: on one replica with all examples, on one with as many as each
    of the replicas gets, and on all replicas. Each is called once, which compiles it,
    and then, in turn, so many times, always on idle devices; medians count.

    Args:
      make: called with a strategy and the number of examples of a step, on all of its
        replicas. It returns a function without arguments that makes one step, and
        returns something of it.
      one: a strategy of one replica.
      many: the strategy to look at.
      examples: how many a step has; as many on each replica.
      repeats: how often each step is timed.
      clock: returns seconds.

    Raises:
      ValueError: the examples cannot be divided, or `one` has several replicas, or
        `repeats` is less than 1.
      TypeError: `make` did not return a function; `one` or `many` is no strategy; a
        number is not whole.

    >>> import jaxstrategy as js
    >>> import numpy as np
    >>> def make(strategy, examples):
    ...     n = strategy.num_replicas_in_sync
    ...     x = strategy.per_replica(np.ones((n, examples // n, 8), np.float32))
    ...     @strategy.run
    ...     def step(w, x):
    ...         share = (x @ w).mean()
    ...         return w - js.get_replica_context().all_reduce("mean", share)
    ...     return lambda: step(np.ones(8, np.float32), x)
    >>> devices = js.simulate(8)
    >>> one, four = js.OneDeviceStrategy("CPU:0"), js.MirroredStrategy(devices[:4])
    >>> found = js.profiling.compare(make, one, four, examples=64)
    >>> found.replicas, found.examples
    (4, 64)
    """
    checked_core(one)
    n = checked_core(many).num_replicas_in_sync
    if one.num_replicas_in_sync != 1:
        raise ValueError(
            f"`one` has {one.num_replicas_in_sync} replicas; a strategy of one was "
            'wanted, such as `OneDeviceStrategy("CPU:0")`.'
        )
    examples = at_least(0, "examples", examples)
    if not examples or examples % n:
        raise ValueError(
            f"`examples` was {examples}, which {n} replicas cannot share equally. "
            f"Give a multiple of {n}."
        )
    repeats = positive("repeats", repeats)
    calls = []
    for strategy, rows in ((one, examples), (one, examples // n), (many, examples)):
        call = make(strategy, rows)
        if not callable(call):
            raise TypeError(
                f"`make` returned {call!r}; a function that makes one step was wanted: "
                "`return lambda: step(state, batch)`."
            )
        calls.append(call)

    def seconds(call: Callable[[], PyTree]) -> float:
        start = clock()
        jax.block_until_ready(call())
        return clock() - start

    for call in calls:
        jax.block_until_ready(call())  # compiles
    times = [[seconds(call) for call in calls] for _ in range(repeats)]
    whole, part, all_ = map(statistics.median, zip(*times, strict=True))
    note, devices = "", many.devices
    if len(devices) > 1 and all(device.platform == "cpu" for device in devices):
        cores = with_noun(os.cpu_count() or 1, "core")
        note = (
            f"The replicas are CPU devices, which share this computer's {cores}: they "
            "cannot be faster than one that uses all of these."
        )
    return Comparison(n, examples, whole, part, all_, note)
