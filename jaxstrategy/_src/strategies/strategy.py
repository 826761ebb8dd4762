"""`Strategy`, the base class of all strategies, with their public methods."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeAlias, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.tree_util import KeyPath

from jaxstrategy._src import masks, text
from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import check_arguments, checked_core
from jaxstrategy._src.errors import OutOfSyncError, TracedValueError
from jaxstrategy._src.executors.executor import (
    AbstractExecutor,
    CompiledStep,
    ReplicatedFunction,
    file_of,
)
from jaxstrategy._src.executors.step_loop import accumulated, checked_parts, several
from jaxstrategy._src.inputs.dataset import DistributedDataset, divided
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    checked_input_options,
)
from jaxstrategy._src.options import (
    CommunicationOptions,
    ReduceOp,
    RunOptions,
    ValueContext,
    checked_options,
)
from jaxstrategy._src.processes.agreement import Agreement
from jaxstrategy._src.profiling import links
from jaxstrategy._src.profiling.metric_logger import MetricLogger
from jaxstrategy._src.profiling.profile import Profile, StepAnalysis
from jaxstrategy._src.reductions.compression import CompressionState
from jaxstrategy._src.reductions.cross_device_ops import (
    CrossDeviceOps,
    PlannedOps,
    UserPlan,
    checked_ops,
)
from jaxstrategy._src.reductions.fingerprint import fingerprints
from jaxstrategy._src.reductions.operations import OPERATIONS, checked_axis
from jaxstrategy._src.reductions.packing import overlap_on
from jaxstrategy._src.reductions.reduction import (
    EagerReduction,
    HowReduced,
    LocalReduction,
    Reduction,
)
from jaxstrategy._src.replicas import devices as _devices, mesh as _mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import REPLICATED, Replicas
from jaxstrategy._src.replicas.state_sharding import StateSharding, checked_sharding
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.strategies.choices import (
    Choices,
    check_function,
    check_options,
    needs_arguments,
)
from jaxstrategy._src.strategies.cross_replica import (
    compared_copies,
    compression_state,
    differing,
    dimensions,
    gatherer,
    has_copies,
    in_parts,
    local_results,
    not_known,
    reducer,
)
from jaxstrategy._src.strategies.extended import StrategyExtended
from jaxstrategy._src.text import shown, whole
from jaxstrategy._src.tracing.explanation.explain import explain
from jaxstrategy._src.tracing.explanation.explanation import Explanation
from jaxstrategy._src.tracing.init import build_replicated
from jaxstrategy._src.values import arrays, building, per_replica as _per_replica
from jaxstrategy._src.values.arrays import (
    Function,
    Leaf,
    Number,
    PyTree,
    TreeFunction,
    TreeT,
)
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.policy import ReplicatedVariables, VariablePolicy

Decorator: TypeAlias = Callable[[Function], ReplicatedFunction]

NOT_GIVEN: Any = object()
"""The default of arguments that may be anything."""

# All processes begin passes over datasets in the same order.
_passes = itertools.count()


class Strategy(AbstractStrategy):
    """Runs one step on many replicas. Make one of its subclasses.

    Args:
      devices: the devices of the replicas, in replica order.
      cross_device_ops: how values are reduced over the replicas.
      communication_options: the same, in more detail.
      sharding: which state each replica keeps a part of, instead of all of it.
      logical_axes: names and sizes of further axes of the mesh, such as `{"core": 2}`:
        so many devices together are one replica, which divides its arrays over them
        as `jax.lax.with_sharding_constraint` says.
      replicas_per_device: how many replicas share a device.

    Raises:
      ValueError: no device, or one twice; operations that name other replicas.
      TypeError: something else than devices, operations or options.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> isinstance(strategy, js.Strategy), isinstance(js.get_strategy(), js.Strategy)
    (True, True)
    """

    _choices: Choices
    _compiled_reduction: Reduction
    _variable_policy: VariablePolicy
    _executor: AbstractExecutor
    _extended: StrategyExtended

    def __init__(
        self,
        devices: Sequence[Device],
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
    ) -> None:
        checked_options(communication_options, of_strategy=True)
        replicas = Replicas.on(
            devices, checked_sharding(sharding), logical_axes, replicas_per_device
        )
        self._compose(Choices(replicas, cross_device_ops, communication_options))

    def _compose(self, choices: Choices) -> None:
        _devices.set_up_by_environment()
        self._choices, options = choices, choices.options
        self._replicas = choices.replicas
        if options is not None and options.deterministic:
            self._replicas = dataclasses.replace(self._replicas, in_turn=True)
        self._compiled_reduction = _reduction_for(self, choices)
        self._overlap = overlap_on(choices.replicas, options)
        policy = choices.variables or ReplicatedVariables(self._replicas)
        # The base class declares the abstract policy that lower folders may use.
        self._variable_policy = policy  # pyright: ignore[reportIncompatibleVariableOverride]
        self._executor = choices.executor(self, choices.processes)
        # Of each way to reduce or gather, so that each compiles once.
        self._across: dict[Hashable, TreeFunction] = {}
        # Where mirrored variables are, if they are elsewhere: both compute together.
        # Comparing asks the default strategy for its devices, which would start JAX.
        home = policy.replicas
        is_same = home is self._replicas or home == self._replicas
        self._variable_sharding = None if is_same else home.sharding(REPLICATED)
        self._extended = StrategyExtended(self, self._executor, choices)

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` of the replicas' devices.

        Its axes are `"replica"` and those of `logical_axes`.
        """
        return self._replicas.mesh

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each replica, the first if it has several, in replica order.

        With `replicas_per_device` a device is there as often as replicas share it.
        """
        return self._replicas.devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take a step together."""
        return self._replicas.count

    @property
    def extended(self) -> StrategyExtended:
        """Reductions to chosen devices, for code that needs them."""
        return self._extended

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that the strategy was given; None where there is no cluster."""
        return None

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
        return _context.Scope(self)

    @overload
    def run(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def run(self, fn: Callable[[], Any]) -> PyTree: ...
    @overload
    def run(
        self, fn: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    @overload
    def run(
        self,
        fn: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree: ...
    @overload
    def run(
        self,
        fn: Function,
        args: Sequence[PyTree] = ...,
        *,
        kwargs: dict[str, PyTree],
        options: RunOptions | None = None,
    ) -> PyTree: ...
    def run(
        self,
        fn: Function = NOT_GIVEN,
        args: Sequence[PyTree] = NOT_GIVEN,
        kwargs: dict[str, PyTree] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
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

        `@strategy.run(options=...)` takes options. A function without parameters is
        run at once by `strategy.run(fn)`, as in TensorFlow. One that has parameters
        and needs none is decorated by `@strategy.step`, or run with `args=()`.

        Where there are several replicas, each line of `jax.debug.print` in `fn` begins
        with the one that printed it, as in `replica 3: loss 0.25`.

        Args:
          fn: the step, as one replica sees it, or what `@strategy.run` made of it.
            Inside it `get_replica_context()` has the replica's id and the ways to the
            other replicas.
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
            an object that hides arrays of the step; or no arguments were given to a
            function that takes some and needs none.
        """
        check_options(options)
        if fn is NOT_GIVEN:
            return functools.partial(self._decorate, options=options)
        advice = "the step function itself: `strategy.run(step, args=(state, batch))`"
        check_function(fn, "run", advice)
        if args is NOT_GIVEN:
            if kwargs is None and needs_arguments(fn):
                return self._decorate(fn, options=options)
            args = ()
        check_arguments(args, kwargs)
        if isinstance(fn, CompiledStep) and options is None:
            return fn(*args, **(kwargs or {}))
        fn, options = _undecorated(fn, options)
        return self._executor.run(fn, (tuple(args), dict(kwargs or {})), options)

    @overload
    def step(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def step(
        self, fn: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    def step(
        self,
        fn: Function = NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> ReplicatedFunction | Decorator:
        """Makes a step that runs on all replicas whenever it is called.

        What `run` does as a decorator, whatever arguments the function takes: `run`
        calls a function without parameters at once, as TensorFlow does.

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
        if fn is NOT_GIVEN:
            return functools.partial(self.step, options=options)
        advice = (
            "the step function itself; it is called afterwards: "
            "`strategy.step(fn)(*args)`"
        )
        check_function(fn, "step", advice)
        return self._decorate(fn, options=options)

    @overload
    def several(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def several(
        self, step: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    def several(
        self,
        step: Function = NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> ReplicatedFunction | Decorator:
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
        >>> for batches in js.experimental.grouped(dataset, 2):
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
        return self._looped(step, options, "several")

    @overload
    def local_steps(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def local_steps(
        self, step: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    def local_steps(
        self,
        step: Function = NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> ReplicatedFunction | Decorator:
        """Several steps in one call, that each replica takes by itself.

        One call takes k batches and k steps, as `several`, and no step waits for the
        other replicas. After the last, each floating-point array of the state that a
        step changed becomes its mean over the replicas: parameters, moments of the
        optimizer, statistics of BatchNorm, in a pytree, objects of Flax NNX and
        mirrored variables alike. All replicas have the same state again, and the state
        was sent once for k steps. This is local SGD (Stich 2018, arXiv:1805.09767). The
        optimizer of `jaxstrategy.optax.outer` keeps moments for each replica.

        The step is the one that trains with all replicas together. Its reductions take
        what this replica has for what every replica has: the mean, the smallest and
        the largest are the replica's own, the sum is that times their number. So one
        step of plain SGD and a mean afterwards is a step on the global batch. Whatever
        else it sends (`all_gather`, `jax.lax.pmean` by hand, Flax's
        `BatchNorm(axis_name=...)`) is refused. What the step reduces *and returns*
        besides the state, such as a loss, is reduced as it says, over all replicas,
        for all k steps at once; what else it returns is each replica's own.

        >>> import jax
        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> @strategy.run
        ... def step(w, goal):
        ...     loss, grad = jax.value_and_grad(lambda w: (w - goal) ** 2 / 2)(w)
        ...     loss, grad = js.get_replica_context().all_reduce("mean", (loss, grad))
        ...     return w - 0.5 * grad, loss
        >>> local = strategy.local_steps(step)
        >>> goals = strategy.per_replica([4.0, 8.0])
        >>> local(0.0, (goals, goals))  # they get to 3 and 6
        (Array(4.5, dtype=float32), Array([20.,  5.], dtype=float32))

        Args:
          step: as of `several`: a function, or what `@strategy.run` made of one. Its
            last positional argument is a batch, those before it are the state.
          options: how it is compiled, by default as `step` is.

        Returns:
          A function of the same arguments, with a tuple of batches in the last place,
          as `grouped(dataset, k)` makes them. It returns the state, and anything else
          stacked: `[step, ...]`. Each number of batches is compiled once. With one
          replica it is `several`. Without `step`, a decorator.

        Raises:
          TypeError: `step` cannot be called; otherwise as of `several`.
          ValueError: there are no batches, or they differ in structure, shape or dtype.
          ContextError: the step sends something that is not reduced.
          NotMirroredError: an NNX object has whole numbers that differ between the
            replicas afterwards; elsewhere they come back as a `PerReplica`, and a
            warning says so.
        """
        return self._looped(step, options, "local_steps")

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

    def compile(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        *,
        options: RunOptions | None = None,
    ) -> CompiledStep:
        """Compiles what `run(fn, args, kwargs)` would run, without running it.

        With several processes each must call it, or `load_compiled`, for the same step:
        all of them get it, or an error.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> @strategy.run
        ... def step(w, batch):
        ...     share = js.masked_mean(w * batch)
        ...     return w - js.get_replica_context().all_reduce("mean", share)
        >>> dataset = strategy.experimental_distribute_dataset(
        ...     js.batches(np.arange(8.0), 8))
        >>> w = jax.ShapeDtypeStruct((), np.float32)
        >>> train = strategy.compile(step, (w, dataset.element_spec))
        >>> for batch in dataset:
        ...     print(train(np.float32(1.0), batch))
        -2.5

        Args:
          fn: the step, or what `@strategy.run` or `several` made of it.
          args: its positional arguments. Types may stand for arrays: a
            `jax.ShapeDtypeStruct`, in a `PerReplica` with shape `[replica, ...]`, the
            `element_spec` of a dataset, a whole state by `jax.eval_shape`. A
            `TrainState` holds its model and optimizer: make them once, outside of the
            function that builds it, or they are others than those compiled for.
          kwargs: its keyword arguments.
          options: how it is compiled; by default as it was decorated.

        Returns:
          A `CompiledStep`: called as the step is, for arguments of these types only.
          Its `save(path)` writes it into a file, for `load_compiled`. What the step
          captures is used as by `run`: variables and captured arrays may change, other
          things may not.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TypeError: an argument is neither an array nor hashable.
          ClusterError: another process does something else, or with other types, or has
            traced another program.
          CompiledStepError: another process has raised, which the message has.
          NotImplementedError: the strategy does not compile its steps here.
        """
        fn, options = self._checked_step("compile", fn, args, kwargs, options)
        return CompiledStep(
            fn, tuple(args), dict(kwargs or {}), self._executor, options
        )

    def load_compiled(
        self,
        path: str | os.PathLike[str],
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        *,
        options: RunOptions | None = None,
    ) -> CompiledStep:
        """A step that `compile(fn, args, kwargs).save(path)` has saved.

        The step is traced, which is a small part of the time that compiling takes, to
        see that it computes what it did when it was saved.

        With several processes each has a file of its own, and all must call this, or
        `compile`. If one cannot load its file, this is an error in all, so that all can
        go on to `compile`:

        ```
        try:
            train = strategy.load_compiled(path, step, args)
        except (FileNotFoundError, js.errors.CompiledStepError):
            train = strategy.compile(step, args)
            train.save(path)
        ```

        Args:
          path: as `save` was given it.
          fn: the step, as of `compile`.
          args: its positional arguments, or types, as of `compile`.
          kwargs: its keyword arguments.
          options: how it was compiled; by default as it was decorated.

        Returns:
          A `CompiledStep`.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TypeError: an argument is neither an array nor hashable.
          FileNotFoundError: there is no such file.
          CompiledStepError: the file is of another version of JAX or jaxstrategy,
            another platform, processor, mesh, or option; of other arguments; or the
            step computes something else now. Or another user can write it: loading a
            compiled step runs what is in the file. Or another process has raised.
          Exception: whatever `compile` raises.
        """
        fn, options = self._checked_step("load_compiled", fn, args, kwargs, options)
        return CompiledStep(
            fn, tuple(args), dict(kwargs or {}), self._executor, options, file_of(path)
        )

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
        fn, options = self._checked_step("explain", fn, args, kwargs, options)
        return explain(
            fn,
            tuple(args),
            dict(kwargs or {}),
            environment=self._executor.environment,
            options=options or RunOptions(),
            topology=topology or Topology(25e9, 10e-6, self.num_replicas_in_sync),
            compiled=compiled,
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
            devices=self._replicas.local_devices,
            every=every,
            trace_dir=trace_dir,
            log=log,
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
        _context.require_host(self, "measure_links")
        if arrays.is_staged():
            raise TracedValueError(
                "`strategy.measure_links` was called while JAX traces the function "
                "that calls it (`jax.jit`, `jax.grad`, `jax.lax.scan`): nothing runs "
                "yet. Call it outside."
            )
        return links.measured_together(self._replicas)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        *,
        weights: PyTree | None = None,
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
          A pytree of mirrored arrays, each of the shape `[...]` of a version, without
          the dimensions `axis`; MEAN of integers has JAX's default float dtype. Of
          state that is divided (`js.Sharded`) they are divided, too.

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
        context = _context.require_cross_replica(self, "reduce")
        if options is not None:
            checked_options(options)
        op, is_weighted = ReduceOp(reduce_op), weights is not None
        over = None if axis is None else dimensions(axis)

        def across(tree: PyTree, alone: bool = False) -> PyTree:
            key = op, over, options, is_weighted, alone
            if (apply := self._across.get(key)) is None:
                reduction = self._compiled_reduction
                reduction = reduction.alone() if alone else reduction
                how = HowReduced(op, options)
                function = reducer(how, over, is_weighted, reduction.reduce_leaves)
                apply = self._across[key] = self._executor.across(function)
            return apply((tree, weights) if is_weighted else tree)

        if context.in_step or isinstance(value, (PerReplica, jax.Array)):  # one leaf
            found = across(value)
        else:
            found = in_parts(across, value, functools.partial(across, alone=True))
        return self._beside_variables(found)

    def gather(self, value: PyTree, axis: int = 0) -> PyTree:
        """Every replica's version joined along `axis`, in replica order, leaf by leaf.

        Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`. A leaf that
        is not a `PerReplica` counts as what every replica holds, and is repeated; to
        have divided state (`js.Sharded`) whole, use `js.to_host` instead. Rows that
        only fill up a batch from a dataset are left out when rows are joined. In
        `merge_call` and under `jax.jit` shapes are static, so that they stay; a
        `PaddedRowsWarning` says so.

        Raises:
          ValueError: a leaf is a scalar, or `axis` is out of range for one.
          TypeError: `axis` is not a whole number.
          ContextError: inside `run`; use `get_replica_context().all_gather` there.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.gather(strategy.per_replica([[1, 2], [3, 4]]))
        Array([1, 2, 3, 4], dtype=int32)
        """
        context = _context.require_cross_replica(self, "gather")
        # Checked before it is looked up: True is found under 1, and a list is not.
        key = checked_axis(axis), context.in_step
        if (across := self._across.get(key)) is None:
            function = gatherer(*key, self._compiled_reduction.gathered)
            across = self._across[key] = self._executor.across(function)
        if context.in_step:
            return self._beside_variables(across(value))
        joined = self._beside_variables(in_parts(across, value))
        return masks.without_padding(value, joined, axis)

    def _beside_variables(self, tree: PyTree) -> PyTree:
        sharding = self._variable_sharding
        if sharding is None:
            return tree
        return jax.tree.map(
            lambda leaf: (
                leaf if isinstance(leaf, Tracer) else _mesh.place(leaf, sharding)
            ),
            tree,
        )

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """The version of `value` of each replica of this process, as a tuple.

        A pytree gives a tuple of pytrees. A mirrored array, divided state
        (`js.Sharded`, each entry is all of it), or a container of plain values gives
        one entry per replica too; a single plain value gives a tuple of one. Of a batch
        from a dataset they are the real rows.

        Versions of up to 64 KiB can be computed with each other and with mirrored
        arrays (`sum(versions)`, `jnp.stack(versions)`): each is copied to all devices
        of this process. Larger ones stay on their replica's device, so that nothing
        large is copied unseen; `jax.device_get` or `strategy.gather` brings them
        together.

        Raises:
          ContextError: inside `run`, where there is one version.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.experimental_local_results(strategy.per_replica([3, 4]))
        (Array(3, dtype=int32), Array(4, dtype=int32))
        >>> strategy.experimental_local_results("plain")
        ('plain',)
        """
        context = _context.require_cross_replica(self, "experimental_local_results")
        return local_results(value, self._replicas, context.in_step)

    def assert_in_sync(self, tree: PyTree, name: str = "tree") -> None:
        """Checks that all replicas hold the same bits of `tree`.

        For state that should be equal on all replicas, now and then between steps. The
        copies of each mirrored array, and the versions of each `PerReplica`, are
        compared by 64 bits computed from them where they are: one pass over the memory
        and one small collective, however large the arrays. It waits for the steps
        before it, and changes nothing; with several processes, each must call it. A
        change of a single number of up to 64 bits is always found, anything else is
        missed once in 2**64.

        Bits are compared, not numbers: 0.0 and -0.0 differ, NaNs of the same bits do
        not. What has one copy only (host and single-device arrays, state of which each
        replica keeps its own part, numbers, strings, functions, None) is passed over.

        Args:
          tree: a pytree.
          name: how the error calls it.

        Raises:
          OutOfSyncError: it names the arrays that differ and the replicas that hold
            them; its `leaves` has both for programs.
          PlacementError: an array lies on several devices, but neither whole on each of
            this strategy's nor as its divided state; or a `PerReplica` belongs to
            another strategy.
          DonatedValueError: an array was donated before.
          TracedValueError: inside a function traced by JAX (`jax.jit`, `jax.grad`).
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> state = {"w": strategy.mirror(1.0), "n": strategy.per_replica([7, 7, 8, 7])}
        >>> strategy.assert_in_sync(state["w"])
        >>> try:
        ...     strategy.assert_in_sync(state, "state")
        ... except js.errors.OutOfSyncError as error:
        ...     print(error.leaves)
        {"state['n']": ((0, 1, 3), (2,))}
        """
        _context.require_host(self, "assert_in_sync")
        compared = compared_copies(tree, self._replicas, name)
        if self._replicas.count == 1 or not jax.tree.leaves(compared):
            return
        if (across := self._across.get(fingerprints)) is None:
            gathered = self._compiled_reduction.gathered
            of_tree = functools.partial(fingerprints, gathered=gathered)
            across = self._across[fingerprints] = self._executor.across(of_tree)
        found = across(compared)
        if isinstance(found, Tracer):  # the arrays are constants of a traced function
            raise not_known(name)
        by_replica = np.asarray(found)
        if (by_replica != by_replica[0]).any():
            raise OutOfSyncError(differing(compared, by_replica, name))

    @overload
    def mirror(self, tree: Number, *, replica: int | None = None) -> jax.Array: ...
    @overload
    def mirror(self, tree: TreeT, *, replica: int | None = None) -> TreeT: ...
    def mirror(self, tree: PyTree, *, replica: int | None = None) -> PyTree:
        """`tree` with every array and number placed whole on every replica's device.

        Shapes stay. Leaves that are neither (strings, bools, functions) stay as they
        are. An array that is mirrored already is not copied.

        If the strategy has a `sharding`, each device gets its part of large arrays, and
        never has more of them. Where that is only for the optimizer, its state is
        known by its type: states of Optax and what stands in one chain with them,
        `opt_state` of Flax's `TrainState`, the variables of an `nnx.Optimizer`. Other
        arrays lie whole until a step divides what it does not read.

        Args:
          tree: the pytree.
          replica: of arrays whose copies differ (see `assert_in_sync`), the replica
            whose copies count; one of the first process's.

        Raises:
          TypeError: a leaf is a `PerReplica`.
          ValueError: this process has no such replica.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> isinstance(strategy.mirror(1.0), js.Mirrored)
        True
        """
        _context.require_host(self, "mirror")
        if replica is not None:
            tree = self._copies_of(tree, replica)
        return building.replicate(tree, self._replicas)

    def per_replica(self, tree: PyTree) -> PyTree:
        """Values that differ between replicas, as `PerReplica`s on their devices.

        Args:
          tree: a pytree in which a *list* holds one version per replica (each of them
            an array, a number, nested lists of numbers, or a pytree of these), and an
            array that is in no list has shape `[replica, ...]`. Tuples and dicts are
            structure.

        Returns:
          The pytree with a `PerReplica` for each array, with one replica too: it is
          what was asked for. `run` takes it, and returns plain arrays there.

        Raises:
          ValueError: the number of versions is not the number of replicas, or they
            differ in shape, dtype or structure.
          TypeError: a leaf is not an array or a number.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.per_replica([1.5, 2.5])
        PerReplica(float32[] on cpu:0, cpu:1)
        >>> strategy.per_replica({"x": np.zeros((2, 3))})
        {'x': PerReplica(float32[3] on cpu:0, cpu:1)}
        """
        _context.require_host(self, "per_replica")

        def is_end(node: object) -> bool:
            return isinstance(node, (list, PerReplica))

        def place(path: KeyPath, node: PyTree) -> PyTree:
            what = f"value{jax.tree_util.keystr(path)}"
            if isinstance(node, PerReplica):
                arrays.check_alive(_per_replica.contents(node), f"`{what}`")
                return node
            if isinstance(node, list):
                return building.stack(node, self._replicas, what)
            return building.place_stacked(node, self._replicas, what)

        return jax.tree.map_with_path(place, tree, is_leaf=is_end)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Values from `value_fn(ValueContext(i, n))`, called for each replica in order.

        With several processes, each calls it for its own replicas.

        Returns:
          A pytree like the ones `value_fn` returns, each leaf a `PerReplica`; with one
          replica an array.

        Raises:
          ValueError: the values differ in structure, shape or dtype.
          TypeError: a value is not an array or a number.
          ContextError: inside `run`.
          TracedValueError: of several processes, in a function that JAX traces.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> ids = strategy.experimental_distribute_values_from_function(
        ...     lambda ctx: ctx.replica_id_in_sync_group)
        >>> ids.values
        (Array(0, dtype=int32), Array(1, dtype=int32))
        """
        _context.require_host(self, "experimental_distribute_values_from_function")
        n = self.num_replicas_in_sync
        versions = [value_fn(ValueContext(i, n)) for i in self._replicas.local_ids]
        return building.stack(versions, self._replicas, is_local=True)

    def init(
        self, fn: Callable[..., TreeT], *args: PyTree, specs: PyTree = None
    ) -> TreeT:
        """`fn(*args)` built in mirrored form: on every device at once, from nothing.

        No device ever holds a copy of the result that it does not keep, so state that
        just fits can be built. Leaves of the result that are not arrays stay as they
        are; of a `PerReplica` made in `fn` each device gets its own version.

        If the strategy has a `sharding`, each device keeps its part of large arrays, as
        `mirror` places them. Its numbers are those of whole state, bit by bit, so what
        rounding could change is computed whole and then divided, one array after the
        other.

        With `logical_axes` arrays are made in the parts that the devices of a replica
        keep: as `specs` say, else as Flax's annotations do (`nn.with_partitioning`,
        `nn.with_logical_partitioning` with `nn.logical_axis_rules`, and those of
        `nnx`), else as an argument lies of which the array has the shape and the end of
        the path, such as moments of their parameters. The rest is whole on each device.
        Without `logical_axes`, annotations mean nothing.

        Args:
          fn: builds the state, for example a Flax model's `init`.
          args: its arguments; arrays and random keys in them are traced, numbers and
            everything else `fn` sees as they are.
          specs: a pytree of specs (`jax.P`) over logical axes with the structure of the
            result, or of the upper part of it; None for what they do not say.

        Raises:
          TypeError: an argument is a `PerReplica`, or `fn` returned something that is
            neither an array nor a plain value; `specs` has something else than specs.
          ValueError: a spec or an annotation does not fit its array, or names an axis
            that a replica has not.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> w = strategy.init(jax.random.key, 0)
        >>> isinstance(w, js.Mirrored)
        True
        >>> strategy = js.MirroredStrategy(logical_axes={"core": 2})
        >>> w = strategy.init(jnp.zeros, (4, 6), specs=jax.P(None, "core"))
        >>> w.shape, w.sharding.shard_shape(w.shape)
        ((4, 6), (4, 3))
        """
        _context.require_host(self, "init")
        with self.scope():
            return build_replicated(fn, args, self._replicas, specs)

    def compression_state(
        self, params: PyTree, options: CommunicationOptions
    ) -> CompressionState:
        """A state for compressed reductions, in which nothing is left to send.

        `ReplicaContext.all_reduce_compressed` takes it. In Optax
        `optax.all_reduce_gradients` makes it itself, with this method if its `init` is
        called in `scope()` or by `strategy.init`.

        Args:
          params: a pytree of arrays like what is reduced, of any values: parameters,
            for gradients.
          options: with a `compression`.

        Returns:
          A `CompressionState`: for each array that is compressed a `PerReplica` of
          zeros of its shape (with one replica an array), and for `PowerSGD` a mirrored
          array `[columns, rank]`.

        Raises:
          ValueError: `options` have no compression.
          TypeError: `options` are none.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> options = js.experimental.CommunicationOptions(compression="int8")
        >>> params = {"w": np.zeros((3, 100), np.float32), "b": np.zeros(100)}
        >>> strategy.compression_state(params, options).errors
        {'b': None, 'w': PerReplica(float32[3,100] on cpu:0, cpu:1)}
        """
        _context.require_host(self, "compression_state")
        checked_options(options, with_compression=True)
        return compression_state(params, options, self._replicas)

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
            `[rows, ...]`. A list of bare arrays is a list of batches, alike but for
            their rows; one batch of several arrays is a tuple of them, `[(x, y)]`. With
            several processes each reads the same batches and uses its own rows.
          options: see `InputOptions`.

        Returns:
          An iterable of the same pytrees with `PerReplica`s; with one replica of plain
          arrays, which are not filled up.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.
          ValueError: `options` ask for an input pipeline for each replica.
          ContextError: inside `run`.

        What is wrong with a batch (a scalar, text, other rows in one array than in
        another, another structure than the first) is said when the batch is reached,
        with its number and the array's path; the batches before it are given.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> for batch in strategy.experimental_distribute_dataset([np.arange(4)]):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        _context.require_host(self, "experimental_distribute_dataset")
        return self._divided(dataset, False, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The batches of what `dataset_fn` makes, each for one replica.

        For sources of which each process should read its own part: it is told which.

        Args:
          dataset_fn: given an `InputContext`, returns where batches come from, as
            `experimental_distribute_dataset` takes it. It is called once in each
            process, and a step takes as many batches as the process has replicas; with
            `InputReplicationMode.PER_REPLICA`, once for each replica.
          options: see `InputOptions`.

        Returns:
          An iterable of pytrees with `PerReplica`s, with one replica of plain arrays.
          It goes on until no replica has a batch left; those that have none before get
          one without real rows. The batches of the first step may have any sizes;
          later ones are not larger. Scalars are each replica's own.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns nothing that batches can
            be read from.
          ContextError: inside `run`.

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
        _context.require_host(self, "distribute_datasets_from_function")
        require_function(dataset_fn)
        return self._divided(dataset_fn, True, options)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The name that `distribute_datasets_from_function` had in TensorFlow 2.0."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    @property
    def _reduction(self) -> Reduction | LocalReduction | EagerReduction:
        """The reduction of the current context: local, eager or compiled steps."""
        context = _context.current()
        if context.local is not None:
            return context.local.reduction
        if context.eager is not None:
            return context.eager.reduction
        return self._compiled_reduction

    def _decorate(
        self, fn: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction:
        fn, options = _undecorated(fn, options)
        return ReplicatedFunction(fn, self._executor, repr(self), options)

    def _looped(
        self,
        step: Function,
        options: RunOptions | None,
        method: str,
    ) -> ReplicatedFunction | Decorator:
        if step is NOT_GIVEN:
            return functools.partial(getattr(self, method), options=options)
        advice = f"the step: `many = strategy.{method}(step)`"
        check_function(step, method, advice)
        check_options(options)
        step, options = _undecorated(step, options)
        return self._decorate(several(step, method == "local_steps"), options=options)

    def _checked_step(
        self,
        method: str,
        fn: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree] | None,
        options: RunOptions | None,
    ) -> tuple[Function, RunOptions | None]:
        """The undecorated step and its options, after checking the call's arguments."""
        _context.require_host(self, method)
        fn, options = _undecorated(fn, options)
        check_options(options)
        check_function(fn, method)
        check_arguments(args, kwargs)
        return fn, options

    def _copies_of(self, tree: PyTree, replica: int) -> PyTree:
        """`tree` with the copy that `replica` has of each replicated array."""
        own, number = self._replicas.local_ids, whole(replica)
        if number not in own:
            raise ValueError(
                f"`replica` was {shown(replica)}; the number of a replica of this "
                f"process was wanted, {own[0]} to {own[-1]}."
            )

        def copy(leaf: Leaf) -> Leaf:
            if not arrays.is_placed(leaf) or not has_copies(leaf, self._replicas):
                return leaf
            return self._replicas.copies(leaf)[own.index(number)]

        return jax.tree.map(copy, tree, is_leaf=_per_replica.is_per_replica)

    def _divided(
        self, given: Any, is_function: bool, options: InputOptions | None
    ) -> DistributedDataset:
        processes, options = self._choices.processes, checked_input_options(options)

        def agree() -> Agreement:
            if processes is None:
                return Agreement()
            return processes.agreement(f"input {next(_passes)}")

        return divided(given, is_function, options, self._replicas, agree)

    def __repr__(self) -> str:
        replicas = self._replicas
        comma = "," if replicas.per_device > 1 else ""
        where = f"{replicas.description}{comma} on {replicas.device_names}"
        sharding = replicas.state_sharding
        divided = "" if sharding is None else f", sharding={sharding.shard!r}"
        return f"{type(self).__name__}({where}{divided})"

    def _repr_html_(self) -> str:
        rows = [
            (i, self._replicas.device_names_of(i), device.device_kind)
            for i, device in enumerate(self.devices)
        ]
        header = ("replica", "device", "kind")
        return text.rows_of(repr(self), header, rows)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "A strategy can be deep-copied (`copy.deepcopy`) but not copied: a copy "
            "would be another strategy that shares this one's compiled steps."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._compose(self._choices)
        return twin

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make "
            "a strategy in each process instead."
        )


def _undecorated(
    fn: Function, options: RunOptions | None
) -> tuple[Function, RunOptions | None]:
    """The function of a decorated step, and its options where none are given."""
    if isinstance(fn, (ReplicatedFunction, CompiledStep)):
        return fn.function, fn.options if options is None else options
    return fn, options


def _reduction_for(strategy: AbstractStrategy, choices: Choices) -> Reduction:
    """The reduction over the replicas of `strategy` in compiled steps."""
    ops, replicas = checked_ops(choices.ops), strategy._replicas
    if isinstance(ops, PlannedOps):
        plan = ops.plan(replicas)
    else:
        cross_replica = functools.partial(
            _context.entered, strategy=strategy, replica=None, in_step=True
        )
        wrap = functools.partial(_per_replica.from_local, replicas=replicas)
        plan = UserPlan(ops, strategy, wrap, cross_replica)
    return Reduction(replicas, plan.with_options(choices.options, replicas))


def require_function(dataset_fn: object) -> None:
    """Raise unless it can be called."""
    if not callable(dataset_fn):
        raise TypeError(
            f"`dataset_fn` is {dataset_fn!r}, which cannot be called. A function of an "
            "`InputContext` was wanted; a dataset itself is for "
            "`experimental_distribute_dataset`."
        )


def checked_strategy(strategy: object) -> Strategy:
    """The strategy that an argument `strategy` means, with its public methods."""
    core = checked_core(strategy)
    assert isinstance(core, Strategy), "there are no others"
    return core
