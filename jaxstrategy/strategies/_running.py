"""What a strategy does with a step: `Running`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxstrategy import (
    _contexts,
    _mesh,
    _replica,
)
from jaxstrategy._accumulate import accumulated, checked_parts
from jaxstrategy._contexts import AbstractStrategy, Context
from jaxstrategy._devices import Device
from jaxstrategy._options import (
    CommunicationOptions,
    ReduceOp,
    RunOptions,
    checked_options,
)
from jaxstrategy._replica import ReplicaContext
from jaxstrategy._topology import Topology
from jaxstrategy._values import PyTree
from jaxstrategy.cluster._resolver import ClusterResolver
from jaxstrategy.profiling._logger import MetricLogger
from jaxstrategy.profiling._prediction import Prediction
from jaxstrategy.profiling._profile import Profile
from jaxstrategy.reductions._all_reduce import Axes
from jaxstrategy.reductions._cross_device_ops import (
    CrossDeviceOps,
)
from jaxstrategy.strategies._calls import (
    check_arguments,
    check_options,
    needs_arguments,
)
from jaxstrategy.strategies._eager import EagerPrograms
from jaxstrategy.strategies._extended import StrategyExtended
from jaxstrategy.strategies._reduction import Reduction
from jaxstrategy.tracing._company import Company
from jaxstrategy.tracing._programs import Programs
from jaxstrategy.tracing._several import several
from jaxstrategy.tracing._step import Step
from jaxstrategy.tracing.explanation._explain import explain
from jaxstrategy.tracing.explanation._explanation import Explanation
from jaxstrategy.variables import _registry
from jaxstrategy.variables._variable import Variable

_NOT_GIVEN: Any = object()


class Running(AbstractStrategy):
    """The part of a strategy that runs steps.

    Args:
      devices: the devices of the replicas, in replica order.
      cross_device_ops: how values are reduced over the replicas.
      communication_options: the same, in more detail.
    """

    # Whether steps are given up that make no progress.
    _has_timeout = False

    def __init__(
        self,
        devices: Sequence[Device],
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        checked_options(communication_options, self._has_timeout)
        self._mesh = _mesh.mesh_of(devices)
        self._axes: Axes = (_mesh.REPLICA_AXIS,)
        self._programs: Programs | EagerPrograms = Programs(
            self._mesh, self._call_replica, self._variables, self._company
        )
        self._extended = StrategyExtended(self)
        self._reduction = Reduction(self, cross_device_ops, communication_options)

    # What it is.

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` with one device per replica."""
        return self._mesh

    @property
    def devices(self) -> tuple[Device, ...]:
        """The replicas' devices, in replica order."""
        return _mesh.devices_of(self.mesh)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take a step together."""
        return self.mesh.size

    @property
    def extended(self) -> StrategyExtended:
        """Reductions to chosen devices, for code that needs them."""
        return self._extended

    @property
    def reduction(self) -> Reduction:
        """How the replicas' values become one."""
        return self._reduction

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What the strategy was told of its cluster; None where there is none."""
        return None

    @property
    def _company(self) -> Company | None:
        """The other processes."""
        return None

    # Contexts.

    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block in which this is the current strategy.

        Inside it, code is in cross-replica context: `get_strategy()` is this strategy.
        Entering it again inside is allowed. `run` enters it by itself.

        A function jitted by you is traced once, so what it learns about contexts
        (`has_strategy()`) stays what it was on the first call. Functions called inside
        `run` are traced there again.

        Raises:
          ContextError: inside another strategy's scope, or inside `run`.
        """
        return _contexts.Scope(self)

    # Running.

    def run(
        self,
        fn: Callable[..., Any] = _NOT_GIVEN,
        args: Sequence[Any] = _NOT_GIVEN,
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` on every replica, as one compiled program.

        `fn` is traced once per combination of argument structure, shapes and static
        values, whatever the number of replicas. In the arguments, each `PerReplica`
        arrives as this replica's version; arrays and numbers are the same on every
        replica; bools, strings, None and other hashable objects are static. In the
        results, an array that is provably equal on all replicas is a plain array,
        replicated; any other is a `PerReplica`. Variables, and
        whatever else is not an array, come back as they are (as they were when the
        step was traced). The call returns before the devices are done.

        As a decorator it makes a step that runs on all replicas whenever it is called:

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> @strategy.run
        ... def step(total, x):
        ...     x = js.get_replica_context().all_reduce("sum", x)
        ...     return total + x
        >>> x = strategy.per_replica([1.0, 2.0, 3.0, 4.0])
        >>> step(0.0, x)
        Array(10., dtype=float32)

        `@strategy.run(options=...)` takes options. A function that can be called
        without arguments is run at once by `strategy.run(fn)`, as in TensorFlow.

        Args:
          fn: the step, as one replica sees it. Inside it `get_replica_context()` has
            the replica's id and the ways to the other replicas.
          args: its positional arguments, a tuple or list.
          kwargs: its keyword arguments.
          options: see `RunOptions`.

        Returns:
          A pytree like the one `fn` returns.

        Raises:
          ContextError: inside another `run`, or in another strategy's scope.
          TracedValueError: Python code in `fn` needs the value of a traced array.
          PlacementError: an argument belongs to another strategy, or is split over
            the replicas without being a `PerReplica`.
          DonatedValueError: an argument was donated to an earlier call.
          TypeError: an argument is neither an array nor hashable, or `fn` returned
            an object that hides arrays of the step.
        """
        check_options(options)
        if fn is _NOT_GIVEN:
            return functools.partial(self._decorate, options=options)
        if not callable(fn):
            raise TypeError(
                f"`run` was given {fn!r}, which cannot be called. Give the step "
                "function itself: `strategy.run(step, args=(state, batch))`."
            )
        if args is _NOT_GIVEN:
            if kwargs is None and needs_arguments(fn):
                return self._decorate(fn, options=options)
            args = ()
        check_arguments(args, kwargs)
        return self._run(fn, tuple(args), dict(kwargs or {}), options)

    def step(
        self,
        fn: Callable[..., Any] = _NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> Callable[..., Any]:
        """Makes a step that runs on all replicas whenever it is called.

        What `run` does as a decorator, whatever arguments the function takes: `run`
        calls a function that needs none at once, as TensorFlow does.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> @strategy.step
        ... def count(by=1):
        ...     return js.get_replica_context().all_reduce("sum", by)
        >>> count()
        Array(4, dtype=int32)

        Args:
          fn: the step, as one replica sees it. Without it, `@strategy.step(options=)`
            is a decorator.
          options: see `RunOptions`.

        Returns:
          A function of the same arguments, as `run` takes them.

        Raises:
          TypeError: `fn` cannot be called.
        """
        check_options(options)
        if fn is _NOT_GIVEN:
            return functools.partial(self.step, options=options)
        if not callable(fn):
            raise TypeError(
                f"`step` was given {fn!r}, which cannot be called. Give the step "
                "function itself; it is called afterwards: `strategy.step(fn)(*args)`."
            )
        return self._decorate(fn, options=options)

    def _decorate(
        self, fn: Callable[..., Any], *, options: RunOptions | None = None
    ) -> Callable[..., Any]:
        def programs_of(fn: Callable[..., Any]) -> Callable[..., Any]:
            return self._programs.of(fn, options)

        def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._run(fn, args, kwargs, options)

        return Step(fn, programs_of, run, repr(self), options)

    def explain(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        options: RunOptions | None = None,
        topology: Topology | None = None,
        compiled: bool = True,
    ) -> Explanation:
        """What `run(fn, args, kwargs)` would do, without running it.

        The step is traced, so its Python code runs once, and compiled, but nothing is
        computed. What `run` would refuse or warn about is listed, not raised.

        Args:
          fn: the step, or what `@strategy.run` made of it.
          args: its positional arguments. Arrays may be `jax.ShapeDtypeStruct`s, in a
            `PerReplica` with shape `[replica, ...]`, for a step too large to be here.
          kwargs: its keyword arguments.
          options: how `run` would compile it; by default as it was decorated.
          topology: the links that communication times are predicted for, by default
            25 GB/s (a 200 Gbit/s network) and 10 microseconds a message.
          compiled: whether to compile the step, for XLA's figures on memory and
            floating-point operations. Without, large steps are explained in less time.

        Returns:
          An `Explanation`: collectives with their source lines, mirrored and
          per-replica results, static arguments, arguments that could be donated,
          predicted communication times; it prints as a report.

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
        >>> found.communication_time(js.Topology(1e9, 1e-6, replicas=64), "ring")
        0.00012601575
        """
        _contexts.require_host(self, "explain")
        if isinstance(fn, Step):
            options = fn.options if options is None else options
            fn = fn.function
        check_options(options)
        check_arguments(args, kwargs)
        if not callable(fn):
            raise TypeError(
                f"`explain` was given {fn!r}, which cannot be called. Give the step "
                "function itself, and its arguments: `strategy.explain(step, (x,))`."
            )
        return explain(
            fn,
            tuple(args),
            dict(kwargs or {}),
            call=self._call_replica,
            variables=self._variables,
            mesh=self.mesh,
            options=options or RunOptions(),
            topology=topology or Topology(25e9, 10e-6, self.num_replicas_in_sync),
            compiled=compiled,
        )

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions | None,
    ) -> Any:
        context = _contexts.require_cross_replica(self, "run")
        if context is not None and context.in_step:
            return self._run_in_step(fn, args, kwargs)
        watched = None if context is None else _contexts.steps_are_watched()
        if watched is None:
            return self._programs.of(fn, options)(args, kwargs)
        before, after = watched
        before()
        results = self._programs.of(fn, options)(args, kwargs)
        after()
        return results

    def _run_in_step(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`run` inside `merge_call`: the step goes on, in the same trace."""
        args, kwargs = _replica.own_versions((args, kwargs))
        replica = ReplicaContext(self, self._axes)
        with _contexts.entered(Context(self, replica, in_step=True)):
            returned = fn(*args, **kwargs)
            return replica.to_cross(returned)

    def _call_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One replica's call of `fn`, while it is traced."""
        replica = ReplicaContext(self, self._axes)
        with _contexts.entered(Context(self, replica, in_step=True)):
            return fn(*args, **kwargs)

    def _variables(self) -> list[Variable]:
        """Those that steps may use."""
        return _registry.usable_by(self)

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
        if how not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(
                f"`op` was {op!r}; parts of a batch are summed ('sum') or averaged "
                "('mean')."
            )
        return functools.partial(
            accumulated, k=parts, mean=how is ReduceOp.MEAN, has_aux=has_aux
        )

    def several(
        self,
        step: Callable[..., Any] = _NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> Callable[..., Any]:
        """A step that is made several times in one call, with a batch for each time.

        One program goes through the batches, so that the host has little to do: for
        steps that are shorter than the time it takes to start one. The results are
        those of a loop in Python, up to rounding. The batches are stacked on the
        devices, so that during the call they are there twice.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> @strategy.run(options=js.RunOptions(donate_argnums=0))
        ... def step(total, batch):
        ...     share = js.masked_mean(batch)
        ...     mean = js.get_replica_context().all_reduce("mean", share)
        ...     return total + mean, mean
        >>> many = strategy.several(step)
        >>> dataset = strategy.experimental_distribute_dataset(
        ...     js.batches(np.arange(10.0), 4))
        >>> total = strategy.mirror(0.0)
        >>> for batches in js.grouped(dataset, 2):
        ...     total, means = many(total, batches)
        ...     print(means)
        [1.5 5.5]
        [8.5]

        Args:
          step: a function, or what `@strategy.run` made of one. Its last positional
            argument is a batch. The arguments before it are what it goes on with: it
            returns new ones first, then anything else. Modules and optimizers of Flax
            NNX are changed in place and not returned. Keyword arguments, and arguments
            that are no arrays or trees of them (strings, bools, functions), are the
            same in all steps.
          options: how it is compiled, by default as `step` is; `donate_argnums` counts
            the arguments in the same way.

        Returns:
          A function of the same arguments, with a tuple of batches in the last place.
          It returns what the last step goes on with, and anything else stacked:
          `[step, ...]`. Each number of batches is compiled once. `explain` takes it.
          Without `step`, a decorator.

        Raises:
          TypeError: `step` cannot be called. When it is called: the batches are in no
            tuple; the step does not return what it goes on with, of the same structure,
            shapes and dtypes.
          ValueError: there are no batches, or they differ in structure, shape or dtype.
          ObjectError: it returns an NNX object, or changes of one what is no variable.
        """
        if step is _NOT_GIVEN:
            return functools.partial(self.several, options=options)
        if not callable(step):
            raise TypeError(
                f"`several` was given {step!r}, which cannot be called. Give the step: "
                "`many = strategy.several(step)`."
            )
        check_options(options)
        if isinstance(step, Step):
            step, options = step.function, options or step.options
        return self._decorate(several(step), options=options)

    def profile(
        self,
        step: Callable[..., Any],
        *,
        examples: int | None = None,
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
        until its results are there is the devices'. The time from one such wait to the
        next is that of the loop. The first call is told apart.

        Before the first call the step is traced once more, as `explain` does, for the
        collectives in it; the links between the replicas are measured with a few
        all-reduces. With several processes, do the same in each.

        Args:
          step: what the loop calls: what `@strategy.run` or `several` made, or another
            function, of whose communication nothing is known (a bound step is one).
          examples: how many examples a step has; by default the rows of the batch it is
            given, with those that fill it up.
          every: see above; at least 2.
          trace_dir: where to write a trace of the third to fifth call
            (`jax.profiler.trace`), on process 0; its calls are not timed.
          log: gets the times after each wait, as `profile/dispatch` and so on.
          topology: the links for the communication times, instead of measured ones.

        Returns:
          A `Profile`: a context manager that is called as the step is.

        Raises:
          ValueError: `every` is less than 2.
          TypeError: it is not a whole number, or `step` cannot be called.
        """
        return Profile(
            step,
            Prediction(step, self.explain, self.mesh, topology),
            examples=examples,
            every=every,
            trace_dir=trace_dir,
            log=log,
        )

    def _across(
        self, context: Context | None, function: Callable[..., Any], value: PyTree
    ) -> PyTree:
        """`function(tree)` of one replica's `value`, wherever we are."""
        if context is not None and context.in_step:
            return function(_replica.to_replica(value))
        return self._programs.of(function)((value,), {})
