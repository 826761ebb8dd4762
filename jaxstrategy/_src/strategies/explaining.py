"""Steps as a strategy's user looks into them: `ExplainsSteps`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.replica_context import check_arguments
from jaxstrategy._src.errors import TracedValueError
from jaxstrategy._src.executors.compiled import CompiledStep, ReplicatedFunction
from jaxstrategy._src.executors.step_loop import accumulated, checked_parts
from jaxstrategy._src.options import ReduceOp, RunOptions
from jaxstrategy._src.profiling import links
from jaxstrategy._src.profiling.metric_logger import MetricLogger
from jaxstrategy._src.profiling.profile import Profile, StepAnalysis
from jaxstrategy._src.reductions.operations import OPERATIONS
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.strategies.choices import check_options
from jaxstrategy._src.strategies.composition import ComposedStrategy
from jaxstrategy._src.tracing.explanation.explanation import Explanation
from jaxstrategy._src.values.arrays import Function, PyTree, is_staged


class ExplainsSteps(ComposedStrategy):
    """The methods of a strategy that explain, measure and divide steps."""

    def explain(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        *,
        options: RunOptions | None = None,
        topology: Topology | None = None,
        compiled: bool = True,
    ) -> Explanation:
        """A description of what `run(fn, args, kwargs)` would do, without running it.

        The step is traced, so its Python code runs once, and compiled, but nothing is
        computed. What `run` would refuse or warn about is listed, not raised.

        Args:
          fn: the step, or what `@strategy.run` made of it.
          args: its positional arguments. Arrays may be `jax.ShapeDtypeStruct`s, in a
            `PerReplica` with shape `[replica, ...]`, for a step too large to be here.
          kwargs: its keyword arguments.
          options: how `run` would compile it; by default as it was decorated.
          topology: the links that communication times are predicted for, by default
            25 GB/s (a 200 Gbit/s network) and 10 microseconds a message;
            `measure_links()` has those that are here.
          compiled: whether to compile the step, for XLA's figures on memory and
            floating-point operations. Without, large steps are explained in less time.

        Returns:
          An `Explanation`: collectives with their source lines, mirrored and
          per-replica results, static arguments, arguments that could be donated,
          predicted communication times; it prints as a report. Under a strategy with
          `sharding=` its `sharding` says which arrays each replica keeps a part of and
          why others are whole, the bytes on a device, and what a step gathers and
          scatters; collectives are those of the program that runs. Where a replica has
          several devices, `sharding` says how arrays lie on them, and
          `inner_collectives` what they exchange.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TracedValueError: Python code in `fn` needs the value of a traced array.
          TypeError: an argument is neither an array nor hashable.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> def step(w, x):
        ...     grad = js.get_replica_context().all_reduce("mean", w * x)
        ...     return w - grad, grad.sum() + x.sum()
        >>> x = strategy.per_replica(np.ones((4, 2), np.float32))
        >>> found = strategy.explain(step, (np.ones(2, np.float32), x))
        >>> [(c.operation, c.nbytes, c.line.code) for c in found.collectives]
        [('psum', 8, 'grad = js.get_replica_context().all_reduce("mean", w * x)')]
        >>> [value.path for value in found.per_replica]
        ['step(...)[1]']
        >>> links = js.profiling.Topology(1e9, 1e-6, replicas=64)
        >>> found.communication_time(links, "ring")
        0.00012601575

        Where each replica keeps a part of the state:

        >>> state = js.StateSharding("optimizer", min_bytes=8)
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4], sharding=state)
        >>> def step(w, m, x):
        ...     grad = jax.grad(lambda w: (w * x).sum())(w)
        ...     m = 0.9 * m + js.get_replica_context().all_reduce("mean", grad)
        ...     return w - 0.1 * m, m
        >>> w, x = np.ones(16, np.float32), strategy.per_replica(np.ones((4, 16), "f4"))
        >>> found = strategy.explain(step, (w, 0 * w, x), compiled=False)
        >>> [(c.operation, c.nbytes) for c in found.collectives]
        [('reduce_scatter', 64), ('all_gather', 16)]
        >>> leaves = found.sharding.leaves
        >>> [(leaf.path, leaf.device_bytes, leaf.dimension) for leaf in leaves]
        [('w', 64, None), ('m', 16, 0)]
        >>> leaves[0].reason
        "each replica's own computation reads it"
        >>> found.sharding.state_bytes, found.sharding.replicated_bytes
        (80, 128)
        """
        context.require_host(self, "explain")
        if isinstance(fn, (ReplicatedFunction, CompiledStep)):
            options = fn.options if options is None else options
            fn = fn.function
        check_options(options)
        check_arguments(args, kwargs)
        if not callable(fn):
            raise TypeError(
                f"`explain` was given {fn!r}, which cannot be called. Give the step "
                "function itself, and its arguments: `strategy.explain(step, (x,))`."
            )
        return self._executor.explain(
            fn,
            tuple(args),
            dict(kwargs or {}),
            options=options or RunOptions(),
            topology=topology or Topology(25e9, 10e-6, self.num_replicas_in_sync),
            compiled=compiled,
        )

    def measure_links(self) -> Topology:
        """The links of the replicas, by the times that all-reduces of 6 sizes take.

        Around a ring, the formula of a `Topology` then gives these times, from 4 KiB to
        8 MiB; `Topology.bounds` says between which times others lie, and `explain`
        prints these. It compiles and runs six small programs, so keep the result. With
        several processes each must call it. Processes that share the cores of one host
        slow each other down, which is then part of the links: measure with as many as
        you predict for. What else loads the host is part of them, too: links that were
        measured when it had more or less to do predict other times than it takes.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          ClusterError: another process is about to do something else.
          TracedValueError: in a function that JAX traces (`jax.jit`).

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> links = strategy.measure_links()
        >>> links.replicas, links.bandwidth > 0
        (4, True)
        >>> links.ring("all_reduce", 4e6) < links.ring("all_reduce", 4e7)
        True
        """
        context.require_host(self, "measure_links")
        _require_known(is_staged(), "measure_links", "nothing runs yet")
        return links.measured_together(self._replicas)

    def accumulate(
        self, k: int, *, op: ReduceOp | str = ReduceOp.MEAN, has_aux: bool = False
    ) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
        """Makes a function of a batch work on `k` parts of it, one after the other.

        For gradients of batches that are too large for the memory: it holds what one
        part needs. Used inside a step, on what a replica computes by itself; reduce
        the result over the replicas afterwards, once.

        In the arguments of the function, arrays are divided along their first
        dimension, and random keys (`jax.random.key`) differ from part to part; numbers
        and everything else are the same for each part. Close over the parameters.

        Args:
          k: how many parts, of equal size.
          op: whether the results are averaged (of a mean over each part, that is the
            mean over the batch) or summed.
          has_aux: whether the function returns a pair, the second of which is kept for
            each part, stacked: `[k, ...]`.

        Returns:
          A decorator. Numbers of 16 bits are summed in float32.

        Raises:
          ValueError: `k` is less than 1, `op` is not SUM or MEAN; when it is called,
            the rows of an array cannot be divided by `k`.
          TypeError: `k` is not a whole number.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> @strategy.run
        ... def step(w, x):
        ...     @strategy.accumulate(3)
        ...     def gradient(x):
        ...         return jax.grad(lambda w: ((w * x) ** 2).mean())(w)
        ...     return js.get_replica_context().all_reduce("mean", gradient(x))
        >>> x = strategy.per_replica(np.ones((2, 6), np.float32))
        >>> step(3.0, x)
        Array(6., dtype=float32)
        """
        parts, how = checked_parts(k), ReduceOp(op)
        row = OPERATIONS[how]
        if not row.is_sum:
            raise ValueError(
                f"`op` was {op!r}; parts of a batch are summed ('sum') or averaged "
                "('mean')."
            )
        return functools.partial(
            accumulated, k=parts, mean=row.divides, has_aux=has_aux
        )

    def profile(
        self,
        step: Function,
        *,
        examples: int | None = None,
        tokens: int | None = None,
        flops: float | None = None,
        peak_flops: float | None = None,
        compiled: bool = True,
        every: int = 50,
        trace_dir: str | os.PathLike[str] | None = None,
        log: MetricLogger | None = None,
        topology: Topology | None = None,
    ) -> Profile:
        """A step with a stopwatch, to find what a training loop waits for.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> @strategy.run
        ... def step(w, batch):
        ...     share = js.masked_mean(batch * w)
        ...     return w - 0.1 * js.get_replica_context().all_reduce("mean", share)
        >>> dataset = strategy.experimental_distribute_dataset([np.ones(8)] * 20)
        >>> w = strategy.mirror(1.0)
        >>> with strategy.profile(step) as train:
        ...     for batch in dataset:
        ...         w = train(w, batch)
        >>> report = train.report()  # prints as a table
        >>> report.steps
        20

        The host's time is that of each call. Now and then, every `every` calls, the
        loop waits for the devices, and one call is made while they are idle: the time
        until its results are there is that of a step by itself. The time from one such
        wait to the next is that of the loop. The first call is told apart.

        With the first call the step is traced once more, as `explain` does, for the
        collectives in it, and compiled once more, for XLA's count of operations and
        plan of memory; the links between the replicas are measured with a few
        all-reduces. With several processes, do the same in each.

        Args:
          step: what the loop calls: what `@strategy.run`, `several`, `compile` or
            `load_compiled` made; a function that calls one, or `strategy.run`, in its
            body; one compiled by `jax.jit`. Of any other, such as a bound step, there
            are times only.
          examples: how many examples a step has; by default the real rows of the batch
            that it is given, if that comes from a dataset of a strategy or from
            `batches`. Of other arrays nobody knows whether they are a batch.
          tokens: how many tokens a step has, on all replicas.
          flops: how many floating-point operations a step has, on all replicas, such as
            6 * parameters * tokens. By default XLA's count for the compiled program,
            which counts the body of a loop once, and what is computed a second time
            to save memory twice.
          peak_flops: the most of them that one device can do in a second, as its data
            sheet says.
          compiled: whether to compile the step once more, for what XLA has to say; one
            that is compiled ahead of time is not compiled again.
          every: see above; at least 2.
          trace_dir: where to write a trace of the third to fifth call
            (`jax.profiler.trace`), on process 0; its calls are not timed.
          log: gets the times after each wait, as `profile/dispatch` and so on.
          topology: the links for the communication times, instead of measured ones.

        Returns:
          A `Profile`: a context manager that is called as the step is.

        Raises:
          ValueError: `every` is less than 2; a number is not positive.
          TypeError: it is not a whole number, or `step` cannot be called.
        """
        given = {
            "examples": examples,
            "tokens": tokens,
            "flops": flops,
            "peak_flops": peak_flops,
        }
        for name, number in given.items():
            if number is not None and not number > 0:
                raise ValueError(
                    f"`{name}` was {number}; a positive number was wanted, or None."
                )
        devices = len(self._replicas.all_devices)
        analysis = StepAnalysis(
            self._executor, self._replicas, topology=topology, compiled=compiled
        )
        return Profile(
            step,
            analysis,
            examples=examples,
            tokens=tokens,
            flops=flops,
            peak_flops=None if peak_flops is None else peak_flops * devices,
            devices=self._replicas.own_devices,
            every=every,
            trace_dir=trace_dir,
            log=log,
        )


def _require_known(is_traced: bool, method: str, why: str) -> None:
    if is_traced:
        raise TracedValueError(
            f"`strategy.{method}` was called while JAX traces the function that calls "
            f"it (`jax.jit`, `jax.grad`, `jax.lax.scan`): {why}. Call it outside."
        )
