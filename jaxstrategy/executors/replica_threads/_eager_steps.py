"""Steps of one strategy that run eagerly, each replica in its thread: `EagerSteps`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import cast, final

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._errors import ContextError
from jaxstrategy._options import RunOptions
from jaxstrategy.contexts import _context, _trace_numbers
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.contexts._replica_context import ReplicaContext
from jaxstrategy.executors.replica_threads import _versions_of_replicas
from jaxstrategy.executors.replica_threads._agreed_rounds import AgreedRounds
from jaxstrategy.executors.replica_threads._eager_call import EagerCall
from jaxstrategy.executors.replica_threads._eager_results import (
    EagerBlock,
    EagerResults,
)
from jaxstrategy.executors.replica_threads._met_primitive import met
from jaxstrategy.executors.replica_threads._one_of_replicas import OneOfReplicas
from jaxstrategy.executors.replica_threads._replica_copies import (
    CopiesOfReplica,
    ReplicaCopies,
)
from jaxstrategy.executors.replica_threads._replica_thread import (
    MergeCall,
    MetArrays,
    ReplicaThread,
    Wanted,
)
from jaxstrategy.executors.replica_threads._replica_turns import ReplicaTurns
from jaxstrategy.executors.replica_threads._thread_settings import thread_settings
from jaxstrategy.processes._job import Processes
from jaxstrategy.reductions._met_collectives import MetCollective
from jaxstrategy.reductions._reduction import Reduction
from jaxstrategy.tracing import _results
from jaxstrategy.tracing._replica_step import StepEnvironment
from jaxstrategy.tracing.functions import _code
from jaxstrategy.values import _arrays
from jaxstrategy.values._types import Function, Leaf, PyTree

RunProgram = Callable[[Function, tuple[PyTree, ...]], PyTree]
"""A function with its arguments as a compiled step."""


@final
class EagerSteps:
    """Runs functions on the replicas of one strategy, each in a thread of its own.

    Args:
      strategy: whose replicas.
      environment: of its steps.
      compiled: runs a compiled step: what replicas do together is what it is compiled.
      processes: those that take its steps together; None for this one alone.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        environment: StepEnvironment,
        compiled: RunProgram,
        processes: Processes | None,
    ) -> None:
        self._strategy = strategy
        self._environment = environment
        self._compiled = compiled
        self._rounds = AgreedRounds(processes, strategy._replicas)

    def run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        """The results of `fn`, called once for each replica of this process.

        Raises:
          ContextError: JAX traces the code that calls.
          DivergentCollectiveError: some replicas wait where others do not.
          NotMirroredError: something that must be equal on all is not.
          BaseException: whatever a replica raises.
        """
        call = EagerCall(fn, args, kwargs, options or RunOptions(), self._environment)
        _check_untraced(call.leaves, call.name)
        replicas = self._strategy._replicas
        copies = ReplicaCopies(replicas, call.name, self._rounds.digests)
        one = OneOfReplicas(replicas, call.name)
        block = cast(EagerBlock, _context.current().runs_eagerly)
        settings = thread_settings(call.options, block.disable_jit)
        columns = call.columns(replicas)

        def body(place: int, thread: ReplicaThread) -> object:
            own = [column[place] for column in columns]
            device = replicas.devices_of(thread.number)[0]
            with settings(replicas, thread.number, device):
                with self._as_replica(thread, copies, place), call.masked(own):
                    returned = call.of_replica(own)
            return _results.take_apart(returned, call.statics, call.name)

        ids = self._ids()
        threads = [
            ReplicaThread(
                number, ids[place], replicas, met, functools.partial(body, place)
            )
            for place, number in enumerate(replicas.own)
        ]

        def answer(wanted: Sequence[Wanted]) -> Sequence[object]:
            if isinstance(wanted[0], MergeCall):
                copies.store(copies.checked())
                return one.merged(self._strategy, cast("Sequence[MergeCall]", wanted))
            return self._reduced(cast("Sequence[MetArrays]", wanted))

        with self._rounds.step(call.name):
            turns = ReplicaTurns(call.name, threads, answer, self._rounds.agree)
            turns.run()
        own = [
            cast("tuple[list[jax.Array], _results.Results]", t.result) for t in threads
        ]
        return self._finished(call, block, own, copies, columns)

    def _finished(
        self,
        call: EagerCall,
        block: EagerBlock,
        own: Sequence[tuple[list[jax.Array], _results.Results]],
        copies: ReplicaCopies,
        columns: Sequence[Sequence[Leaf]],
    ) -> PyTree:
        """The results of the call; variables and objects hold what was assigned."""
        results = EagerResults(
            call.name,
            call.has_objects,
            self._strategy._replicas,
            own,
            self._rounds.digests,
        )
        results.check(call.expected)
        changes = copies.checked()
        key = id(self._strategy), id(_code.code_of(call.fn) or call.fn)
        found = results.value(key, block, [columns[i] for i in call.per_replica])
        copies.store(changes)
        call.check_masks()
        return call.finish(found)

    def _ids(self) -> list[jax.Array]:
        replicas = self._strategy._replicas
        return [
            jax.device_put(np.int32(number), replicas.place_of(number))
            for number in replicas.own
        ]

    @contextlib.contextmanager
    def _as_replica(
        self, thread: ReplicaThread, copies: ReplicaCopies, place: int
    ) -> Iterator[None]:
        """A `with` block in which code is a step's, of one replica."""
        with _context.entered(
            strategy=self._strategy,
            replica=ReplicaContext(self._strategy),
            in_step=True,
            updated=(),
            eager=thread,
            variables=CopiesOfReplica(copies, place, thread),
            trace=_trace_numbers.new_trace(),
        ):
            yield

    def _reduced(self, wanted: Sequence[MetArrays]) -> Sequence[object]:
        """What each replica gets of a collective, which is compiled for all."""
        replicas = self._strategy._replicas
        first = wanted[0]
        stacked = [
            _versions_of_replicas.together(column, replicas)
            for column in zip(*(each.arrays for each in wanted), strict=True)
        ]
        found = self._compiled(_collective_step, (first.collective, *stacked))
        columns = [
            [_versions_of_replicas.as_weak(each, weak) for each in column]
            for result, weak in zip(found, first.weak, strict=True)
            for column in [_versions_of_replicas.apart(result, replicas)]
        ]
        return [[column[i] for column in columns] for i in range(len(wanted))]


def _collective_step(collective: MetCollective, *arrays: jax.Array) -> list[jax.Array]:
    """What one replica gets of a collective; a step of the strategy."""
    strategy = _context.current().strategy
    assert strategy is not None, "it is a step's"
    return collective(cast(Reduction, strategy._reduction), arrays)


def _check_untraced(leaves: Sequence[Leaf], name: str) -> None:
    if _arrays.is_traced() or any(isinstance(leaf, Tracer) for leaf in leaves):
        raise ContextError(
            f"`{name}` was to be run in `eager_replicas()` by code that JAX traces "
            "(`jax.jit`, `jax.grad`, `jax.lax.scan` around `run`), where no array has "
            "a value that the threads of replicas could go on with. Call it outside "
            "of what is traced, or take the gradient inside of the step."
        )
