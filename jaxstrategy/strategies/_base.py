"""What all strategies share: `Strategy`.

A strategy is a mesh with a few choices. Every method is either a rule about contexts,
or a small function run on all replicas through the one door of `tracing`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.sharding import Mesh

from jaxstrategy import (
    _contexts,
    _devices,
    _mesh,
    _padding,
    _replica,
    _tables,
    _values,
)
from jaxstrategy._accumulate import accumulated, checked_parts
from jaxstrategy._contexts import AbstractStrategy, Context
from jaxstrategy._devices import Device
from jaxstrategy._options import (
    CommunicationOptions,
    ReduceOp,
    RunOptions,
    ValueContext,
    checked_options,
)
from jaxstrategy._replica import ReplicaContext
from jaxstrategy._topology import Topology
from jaxstrategy._values import Handle, PerReplica, PyTree
from jaxstrategy.cluster._resolver import ClusterResolver
from jaxstrategy.inputs._agreement import Agreement, Alone
from jaxstrategy.inputs._dataset import DistributedDataset
from jaxstrategy.inputs._division import Replicas
from jaxstrategy.inputs._feeding import Feeding
from jaxstrategy.inputs._options import (
    InputContext,
    InputOptions,
    checked_input_options,
)
from jaxstrategy.profiling._logger import MetricLogger
from jaxstrategy.profiling._prediction import Prediction
from jaxstrategy.profiling._profile import Profile
from jaxstrategy.reductions._all_reduce import Axes
from jaxstrategy.reductions._cross_device_ops import (
    CrossDeviceOps,
)
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.strategies._calls import (
    check_arguments,
    check_options,
    needs_arguments,
)
from jaxstrategy.strategies._extended import StrategyExtended
from jaxstrategy.strategies._in_sync import assert_in_sync
from jaxstrategy.strategies._reducers import dimensions, gatherer
from jaxstrategy.strategies._reduction import Reduction
from jaxstrategy.tracing import _results
from jaxstrategy.tracing._company import Company
from jaxstrategy.tracing._init import build_replicated
from jaxstrategy.tracing._programs import Programs
from jaxstrategy.tracing._several import several
from jaxstrategy.tracing._step import Step
from jaxstrategy.tracing.explanation._explain import explain
from jaxstrategy.tracing.explanation._explanation import Explanation
from jaxstrategy.variables import _registry
from jaxstrategy.variables._variable import Variable

_NOT_GIVEN: Any = object()


class Strategy(AbstractStrategy):
    """Runs one step on many replicas. Make one of its subclasses.

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
        self._programs = Programs(
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
        replicated; any other is a `PerReplica`. Leaves that are not arrays come back
        as they are. The call returns before the devices are done.

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
            something that is neither an array nor a plain value.
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
            return _results.with_values(fn(*args, **kwargs))

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

    # From many values to one.

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        *,
        weights: Any = None,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """One value from all replicas' versions, leaf by leaf.

        A leaf that is not a `PerReplica` counts as what every replica holds: its SUM
        is `num_replicas_in_sync` times it, its MEAN is it.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value: a pytree of `PerReplica`s, arrays and numbers.
          axis: also reduce over this dimension, or these, of each replica's version.
            MEAN is then over all elements of all replicas; over dimension 0 of a
            batch from a dataset, only over its real rows.
          weights: what each entry counts, a `PerReplica` or an array whose shape is
            that of a version's first dimensions; True and False will do. Only for SUM
            and MEAN.
          options: how, instead of as the strategy does.

        Returns:
          A pytree of mirrored arrays; MEAN of integers has JAX's default float dtype.

        Raises:
          ValueError: `reduce_op` is not a reduction; `axis` is out of range; `weights`
            have another shape.
          TypeError: a leaf is not a number; `axis` is not a whole number.
          ContextError: inside `run`; use `get_replica_context().all_reduce` there.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> x = strategy.per_replica([[1.0, 2.0], [3.0, 4.0]])
        >>> strategy.reduce("sum", x)
        Array([4., 6.], dtype=float32)
        >>> strategy.reduce("mean", x, axis=0)
        Array(2.5, dtype=float32)
        >>> known = strategy.per_replica([[True, True], [True, False]])
        >>> strategy.reduce("mean", x, axis=0, weights=known)
        Array(2., dtype=float32)
        """
        context = _contexts.require_cross_replica(self, "reduce")
        checked_options(options)
        is_weighted = weights is not None
        function = self._reduction.of_tree(
            ReduceOp(reduce_op), dimensions(axis), options, is_weighted
        )
        return self._across(
            context, function, (value, weights) if is_weighted else value
        )

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Any]:
        """This replica's arrays reduced over all, or over its group, inside a step."""
        return self._reduction.of_leaves(op, leaves, options, groups)

    def gather(self, value: PyTree, axis: int = 0) -> PyTree:
        """Every replica's version joined along `axis`, in replica order, leaf by leaf.

        Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`. A leaf that
        is not a `PerReplica` counts as what every replica holds, and is repeated. Rows
        that only fill up a batch from a dataset are left out.

        Raises:
          ValueError: a leaf is a scalar, or `axis` is out of range for one.
          TypeError: `axis` is not a whole number.
          ContextError: inside `run`; use `get_replica_context().all_gather` there.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.gather(strategy.per_replica([[1, 2], [3, 4]]))
        Array([1, 2, 3, 4], dtype=int32)
        """
        context = _contexts.require_cross_replica(self, "gather")
        gathered = self._across(context, gatherer(axis, self._axes), value)
        return _without_filling(value, gathered) if axis == 0 else gathered

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """The version of `value` of each replica of this process, as a tuple.

        A pytree gives a tuple of pytrees. A mirrored array, or a container of plain
        values, gives one entry per replica too; a single plain value gives a tuple of
        one. Of a batch from a dataset they are the real rows.

        Raises:
          ContextError: inside `run`, where there is one version.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.experimental_local_results(strategy.per_replica([3, 4]))
        (Array(3, dtype=int32), Array(4, dtype=int32))
        >>> strategy.experimental_local_results("plain")
        ('plain',)
        """
        context = _contexts.require_cross_replica(self, "experimental_local_results")
        in_step = context is not None and context.in_step
        value = _values.map_leaves(
            lambda leaf: leaf.distributed() if isinstance(leaf, Handle) else leaf, value
        )
        leaves, treedef = jax.tree.flatten(value, is_leaf=_values.is_per_replica)
        if treedef == _LEAF and not isinstance(value, (PerReplica, jax.Array)):
            return (value,)
        if value is None:
            return (None,)
        columns = [self._versions(leaf, in_step) for leaf in leaves]
        if treedef == _LEAF:
            return columns[0]
        # A variable of central storage has one copy.
        n = self.num_replicas_in_sync if in_step else len(self._own_replicas)
        columns = [column * n if len(column) == 1 else column for column in columns]
        return tuple(
            jax.tree.unflatten(treedef, [column[i] for column in columns])
            for i in range(n)
        )

    def _versions(self, leaf: Any, in_step: bool) -> tuple[Any, ...]:
        n = self.num_replicas_in_sync if in_step else len(self._own_replicas)
        if isinstance(leaf, PerReplica):
            versions = leaf.values if in_step else _values.real_rows(leaf)
            if len(versions) != n:
                raise ValueError(
                    f"A PerReplica with {len(versions)} versions was given to a "
                    f"strategy with {n} replicas here."
                )
            return versions
        if in_step and isinstance(leaf, jax.Array):
            # Captured by the merge function: it may well differ between replicas.
            return _values.of_local(leaf, _mesh.REPLICA_AXIS).values
        if _values.is_mirrored(leaf):
            return tuple(shard.data for shard in leaf.addressable_shards)
        return (leaf,) * n

    def assert_in_sync(self, tree: PyTree, name: str = "tree") -> None:
        """Nothing if all replicas hold the same bits of `tree`, else an error.

        For state that should be equal on all replicas, now and then between steps. The
        copies of each mirrored array, and the versions of each `PerReplica`, are
        compared by 64 bits computed from them where they are: one pass over the memory
        and one small collective, however large the arrays. It waits for the steps
        before it, and changes nothing; with several processes, each must call it. A
        change of a single number of up to 64 bits is always found, anything else is
        missed once in 2**64.

        Bits are compared, not numbers: 0.0 and -0.0 differ, NaNs of the same bits do
        not. What has one copy only (host and single-device arrays, numbers, strings,
        functions, None) is passed over.

        Args:
          tree: a pytree.
          name: how the error calls it.

        Raises:
          OutOfSyncError: it names the arrays that differ and the replicas that hold
            them; its `leaves` has both for programs.
          PlacementError: an array lies on several devices, but not whole on each of
            this strategy's; or a `PerReplica` belongs to another strategy.
          DonatedValueError: an array was donated before.
          TracedValueError: inside a function traced by JAX (`jax.jit`, `jax.grad`).
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> state = {"w": strategy.mirror(1.0), "n": strategy.per_replica([7, 7, 8, 7])}
        >>> strategy.assert_in_sync(state["w"])
        >>> try:
        ...     strategy.assert_in_sync(state, "state")
        ... except js.OutOfSyncError as error:
        ...     print(error.leaves)
        {"state['n']": ((0, 1, 3), (2,))}
        """
        _contexts.require_host(self, "assert_in_sync")
        assert_in_sync(
            tree, name, self.mesh, self._axes, functools.partial(self._across, None)
        )

    def _across(
        self, context: Context | None, function: Callable[..., Any], value: PyTree
    ) -> PyTree:
        """`function(tree)` of one replica's `value`, wherever we are."""
        if context is not None and context.in_step:
            return function(_replica.to_replica(value))
        return self._programs.of(function)((value,), {})

    # From one value to many.

    def mirror(self, tree: PyTree) -> PyTree:
        """`tree` with every array and number placed whole on every replica's device.

        Leaves that are neither (strings, bools, functions) stay as they are. An array
        that is mirrored already is not copied.

        Raises:
          TypeError: a leaf is a `PerReplica`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> isinstance(strategy.mirror(1.0), js.Mirrored)
        True
        """
        _contexts.require_host(self, "mirror")
        return _values.replicate(tree, self.mesh)

    def per_replica(self, tree: PyTree) -> PyTree:
        """Values that differ between replicas, as `PerReplica`s on their devices.

        Args:
          tree: a pytree in which a *list* holds one version per replica (each of them
            an array, a number, nested lists of numbers, or a pytree of these), and an
            array that is in no list has shape `[replica, ...]`. Tuples and dicts are
            structure.

        Returns:
          The pytree with a `PerReplica` for each array.

        Raises:
          ValueError: the number of versions is not the number of replicas, or they
            differ in shape, dtype or structure.
          TypeError: a leaf is not an array or a number.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.per_replica([1.5, 2.5])
        PerReplica(float32[] on cpu:0, cpu:1)
        >>> strategy.per_replica({"x": np.zeros((2, 3))})
        {'x': PerReplica(float32[3] on cpu:0, cpu:1)}
        """
        _contexts.require_host(self, "per_replica")

        def is_end(node: Any) -> bool:
            return isinstance(node, (list, PerReplica))

        def place(path: Any, node: Any) -> PyTree:
            what = f"value{jax.tree_util.keystr(path)}"
            if isinstance(node, PerReplica):
                return node
            if isinstance(node, list):
                return _values.stack(node, self.mesh, what)
            return _values.place_stacked(node, self.mesh, what)

        return jax.tree.map_with_path(place, tree, is_leaf=is_end)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Values from `value_fn(ValueContext(i, n))`, called for each replica in order.

        With several processes, each calls it for its own replicas.

        Returns:
          A pytree like the ones `value_fn` returns, each leaf a `PerReplica`.

        Raises:
          ValueError: the values differ in structure, shape or dtype.
          TypeError: a value is not an array or a number.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> ids = strategy.experimental_distribute_values_from_function(
        ...     lambda ctx: ctx.replica_id_in_sync_group)
        >>> ids.values
        (Array(0, dtype=int32), Array(1, dtype=int32))
        """
        _contexts.require_host(self, "experimental_distribute_values_from_function")
        n, own = self.num_replicas_in_sync, self._own_replicas
        versions = [value_fn(ValueContext(i, n)) for i in own]
        return _values.stack(versions, self.mesh, own=True)

    @property
    def _own_replicas(self) -> list[int]:
        """The numbers of this process's replicas."""
        here = set(_mesh.own_devices(self.mesh))
        return [i for i, device in enumerate(self.devices) if device in here]

    def init(self, fn: Callable[..., PyTree], *args: Any) -> PyTree:
        """`fn(*args)` built in mirrored form: on every device at once, from nothing.

        No device ever holds a copy of the result that it does not keep, so state that
        just fits can be built. Leaves of the result that are not arrays stay as they
        are.

        Args:
          fn: builds the state, for example a Flax model's `init`.
          args: its arguments; arrays and random keys in them are traced, numbers and
            everything else `fn` sees as they are.

        Raises:
          TypeError: an argument is a `PerReplica`, or `fn` returned something that is
            neither an array nor a plain value.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> w = strategy.init(jax.random.key, 0)
        >>> isinstance(w, js.Mirrored)
        True
        """
        _contexts.require_host(self, "init")
        with self.scope():
            return build_replicated(fn, args, self.mesh)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """`dataset`, each of its global batches divided over the replicas.

        Replica i has the i-th part of the rows, in order. A batch that the replicas
        cannot share equally is filled up with copies of its last row; inside the step
        `masked_mean`, `masked_sum` and `batch_mask` know which rows are real. Some
        batches are read and copied to the devices ahead, in a thread.

        Args:
          dataset: where batches come from: `jaxstrategy.batches` of arrays in memory; a
            list of batches, a function that makes generators, or another iterable; a
            Grain dataset or loader, a PyTorch `DataLoader`, a `tf.data.Dataset`, a
            Hugging Face dataset in NumPy form. A batch is a pytree of arrays of shape
            `[rows, ...]`. With several processes each reads the same batches and uses
            its own rows.
          options: see `InputOptions`.

        Returns:
          An iterable of the same pytrees with `PerReplica`s.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.
          ValueError: `options` ask for an input pipeline for each replica.

        What is wrong with a batch (a scalar, text, other rows in one array than in
        another, another structure than the first) is said when the batch is reached,
        with its number and the array's path; the batches before it are given.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> for batch in strategy.experimental_distribute_dataset([np.arange(4)]):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        _contexts.require_host(self, "experimental_distribute_dataset")
        return self._feeding.of_dataset(dataset, checked_input_options(options))

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """What `dataset_fn` makes, each of its batches for one replica.

        For sources of which each process should read its own part: it is told which.

        Args:
          dataset_fn: given an `InputContext`, returns where batches come from, as
            `experimental_distribute_dataset` takes it. It is called once in each
            process, and a step takes as many batches as the process has replicas; with
            `InputReplicationMode.PER_REPLICA`, once for each replica.
          options: see `InputOptions`.

        Returns:
          An iterable of pytrees with `PerReplica`s. It goes on until no replica has a
          batch left; those that have none before get one without real rows.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns nothing that batches can
            be read from.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> def dataset_fn(context):
        ...     rows = context.get_per_replica_batch_size(4)
        ...     return js.batches(np.arange(8), rows)
        >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        (Array([4, 5], dtype=int32), Array([6, 7], dtype=int32))
        """
        _contexts.require_host(self, "distribute_datasets_from_function")
        if not callable(dataset_fn):
            raise TypeError(
                f"`dataset_fn` is {dataset_fn!r}, which cannot be called. A function "
                "of an `InputContext` was wanted; a dataset itself is for "
                "`experimental_distribute_dataset`."
            )
        return self._feeding.of_function(dataset_fn, checked_input_options(options))

    @property
    def _feeding(self) -> Feeding:
        """How its replicas are fed."""
        own = self._own_replicas
        replicas = Replicas(self.num_replicas_in_sync, own[0], len(own))
        process = jax.process_index(), jax.process_count()
        if replicas.local == replicas.total:
            process = 0, 1
        return Feeding(self.mesh, replicas, process, self._agree)

    def _agree(self) -> Agreement:
        """With the other processes, about one pass over a dataset."""
        return Alone()

    # How it prints and copies.

    def __repr__(self) -> str:
        n = self.num_replicas_in_sync
        replicas = "1 replica" if n == 1 else f"{n} replicas"
        return f"{type(self).__name__}({replicas} on {_devices.names(self.devices)})"

    def _repr_html_(self) -> str:
        rows = [
            (i, _devices.name(device), device.device_kind)
            for i, device in enumerate(self.devices)
        ]
        name = type(self).__name__
        return _tables.html_table(name, ("replica", "device", "kind"), rows)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "A strategy can be deep-copied (`copy.deepcopy`) but not copied: a copy "
            "would be another strategy that shares this one's compiled steps."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        Strategy.__init__(
            twin, self.devices, self._reduction.ops, self._reduction.options
        )
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make "
            "a strategy in each process instead."
        )


_LEAF = jax.tree.structure(0)


def _without_filling(value: PyTree, gathered: PyTree) -> PyTree:
    """`gathered` from all replicas' rows of `value`, only the real ones."""
    leaves, treedef = jax.tree.flatten(gathered)
    masks = [
        leaf.mask if isinstance(leaf, PerReplica) else None
        for leaf in jax.tree.leaves(value, is_leaf=_values.is_whole)
    ]
    if not any(_padding.is_noted(mask) for mask in masks):
        return gathered
    real = [
        leaf[np.flatnonzero(np.asarray(mask))] if _padding.is_noted(mask) else leaf
        for leaf, mask in zip(leaves, masks, strict=True)
    ]
    return jax.tree.unflatten(treedef, real)
