"""What a strategy does with a step: `Running`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxstrategy._options import (
    CommunicationOptions,
    RunOptions,
    checked_options,
)
from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.contexts import (
    _context,
    _replica_context,
)
from jaxstrategy.contexts._context import (
    AbstractStrategy,
    Context,
)
from jaxstrategy.contexts._replica_context import ReplicaContext
from jaxstrategy.executors._eager import EagerPrograms
from jaxstrategy.executors._step import Step
from jaxstrategy.reductions._cross_device_ops import (
    CrossDeviceOps,
)
from jaxstrategy.reductions._reduction import Reduction
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.strategies._calls import (
    check_arguments,
    check_options,
    needs_arguments,
)
from jaxstrategy.strategies._extended import StrategyExtended
from jaxstrategy.strategies._planning import reduction_for
from jaxstrategy.strategies._reducers import TreeFunctions
from jaxstrategy.tracing._company import Company
from jaxstrategy.tracing._programs import Programs
from jaxstrategy.values._per_replica import PyTree
from jaxstrategy.variables import _registry
from jaxstrategy.variables._variable import Variable

NOT_GIVEN: Any = object()
"""The default of arguments that may be anything."""


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
        self._replicas = Replicas.on(devices)
        self._programs: Programs | EagerPrograms = Programs(
            self._replicas.mesh, self._call_replica, self._variables, self._company
        )
        self._extended = StrategyExtended(self)
        self._chosen = cross_device_ops, communication_options
        self._reduction = reduction_for(self, *self._chosen)
        self._functions = TreeFunctions(self._reduction)

    # What it is.

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` with one device per replica."""
        return self.replicas.mesh

    @property
    def replicas(self) -> Replicas:
        """How many replicas there are, and where."""
        return self._replicas

    @property
    def devices(self) -> tuple[Device, ...]:
        """The replicas' devices, in replica order."""
        return self.replicas.devices

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take a step together."""
        return self.replicas.count

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
        return _context.Scope(self)

    # Running.

    def run(
        self,
        fn: Callable[..., Any] = NOT_GIVEN,
        args: Sequence[Any] = NOT_GIVEN,
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
        if fn is NOT_GIVEN:
            return functools.partial(self._decorate, options=options)
        if not callable(fn):
            raise TypeError(
                f"`run` was given {fn!r}, which cannot be called. Give the step "
                "function itself: `strategy.run(step, args=(state, batch))`."
            )
        if args is NOT_GIVEN:
            if kwargs is None and needs_arguments(fn):
                return self._decorate(fn, options=options)
            args = ()
        check_arguments(args, kwargs)
        return self._run(fn, tuple(args), dict(kwargs or {}), options)

    def step(
        self,
        fn: Callable[..., Any] = NOT_GIVEN,
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
        if fn is NOT_GIVEN:
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

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions | None,
    ) -> Any:
        context = _context.require_cross_replica(self, "run")
        if context.in_step:
            return self._run_in_step(fn, args, kwargs)
        if context.around is None or context.strategy is None:
            return self._programs.of(fn, options)(args, kwargs)
        before, after = context.around
        before()
        results = self._programs.of(fn, options)(args, kwargs)
        after()
        return results

    def _run_in_step(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`run` inside `merge_call`: the step goes on, in the same trace."""
        args, kwargs = _replica_context.to_replica((args, kwargs))
        replica = ReplicaContext(self)
        with _context.entered(strategy=self, replica=replica, in_step=True):
            returned = fn(*args, **kwargs)
            return replica.to_cross(returned)

    def _call_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One replica's call of `fn`, while it is traced."""
        replica = ReplicaContext(self)
        with _context.entered(strategy=self, replica=replica, in_step=True):
            return fn(*args, **kwargs)

    def _variables(self) -> list[Variable]:
        """Those that steps may use."""
        return _registry.usable_by(self)

    def _across(
        self, context: Context, function: Callable[..., Any], value: PyTree
    ) -> PyTree:
        """`function(tree)` of one replica's `value`, wherever we are."""
        if context.in_step:
            return function(_replica_context.to_replica(value, read_variables=True))
        return self._programs.of(function)((value,), {})
