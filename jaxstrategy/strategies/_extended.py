"""Reductions to chosen devices, and variables: `strategy.extended`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
from jax.core import Tracer

from jaxstrategy import _contexts, _devices, _mesh, _values
from jaxstrategy._contexts import AbstractStrategy, Context
from jaxstrategy._devices import Device
from jaxstrategy._options import CommunicationOptions, ReduceOp
from jaxstrategy._values import PerReplica, PyTree
from jaxstrategy.strategies._calls import check_arguments
from jaxstrategy.tracing import _results
from jaxstrategy.tracing._binding import is_changed_in_place
from jaxstrategy.tracing._programs import Programs
from jaxstrategy.variables import _registry, _step
from jaxstrategy.variables._variable import Variable

Destinations = Any


@final
class StrategyExtended:
    """Additional methods of a strategy, for library code and optimizers."""

    def __init__(self, strategy: AbstractStrategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that compute, in replica order."""
        return self._strategy.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that hold mirrored variables."""
        return _mesh.devices_of(self._strategy.parameter_mesh)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: one program is compiled for all replicas."""
        return True

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over the replicas and placed on `destinations`.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value: as for `strategy.reduce`.
          destinations: a device or its name for one copy there; several devices, a
            variable (which is not changed), a `PerReplica` or a mirrored value for a
            copy on each device of theirs.
            While a step is traced (in `merge_call`, or under your own `jax.jit`) the
            result is on all replicas, whatever is asked for.
          options: how, instead of as the strategy does.

        Raises:
          ValueError: `reduce_op` is not a reduction, or there is no destination.
          TypeError: a leaf is not a number, or `destinations` names no devices.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> x = strategy.per_replica([1.0, 2.0])
        >>> strategy.extended.reduce_to("sum", x, "CPU:1").devices()
        {CpuDevice(id=1)}
        """
        pairs = [(value, destinations)]
        return self.batch_reduce_to(reduce_op, pairs, options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """Several `reduce_to` in one program: one result per pair, in order.

        Raises:
          ValueError: something else than a sequence of pairs; else as `reduce_to`.
        """
        context = _contexts.require_cross_replica(
            self._strategy, "extended.batch_reduce_to"
        )
        pairs = _checked_pairs(value_destination_pairs)
        shardings = [_sharding(destinations) for _, destinations in pairs]
        op = ReduceOp(reduce_op)
        results = self._strategy.reduce(
            op, [value for value, _ in pairs], options=options
        )
        if context is not None and context.in_step:
            return results
        return [
            _placed(result, sharding)
            for result, sharding in zip(results, shardings, strict=True)
        ]

    # Variables.

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` to change each copy of a variable.

        In it, reading and assigning `var` mean its copy, and aggregation plays no part.
        It is called once for all copies, in cross-replica context; of an on-read
        variable, outside a step, as one compiled program.

        Args:
          var: the variable.
          fn: changes it. What it returns is returned, a variable as its value.
          args: further arguments, which are taken to where the copies are. Reduce a
            `PerReplica` first.
          kwargs: further keyword arguments.
          group: whether to return one result for all copies, not a list of one for
            each.

        Raises:
          ValueError: an argument is a `PerReplica`, so the copies would differ; or the
            variable belongs to another strategy.
          TypeError: `var` is not a variable; `args` is not a tuple or list.
          ContextError: inside `run`; use `merge_call`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable(1.0)
        >>> strategy.extended.update(v, lambda v, a: v.assign_add(a), args=(2.0,))
        Array(3., dtype=float32)
        """
        context = _contexts.require_cross_replica(self._strategy, "extended.update")
        self._check_own(var, "update")
        check_arguments(args, kwargs)
        args, kwargs = tuple(args), dict(kwargs or {})
        _check_same(args, kwargs)
        if context is not None and context.in_step:
            result = self._updated(var, fn, args, kwargs)
        elif var.copies_must_agree:
            args, kwargs = _at(var, (args, kwargs))
            result = self._updated(var, fn, args, kwargs)
        else:
            result = self._updates.of(fn)((var, *args), kwargs)
        return result if group else self._of_each_copy(var, result)

    def _updated(self, var: Variable, fn: Any, args: Any, kwargs: Any) -> Any:
        with self._strategy.scope(), _step.updating():
            return _results.with_values(fn(var, *args, **kwargs))

    @functools.cached_property
    def _updates(self) -> Programs:
        """Programs that update a variable which has a copy per replica."""
        strategy = self._strategy

        def call(fn: Any, args: Any, kwargs: Any) -> Any:
            with _contexts.entered(Context(strategy, in_step=True)), _step.updating():
                return _results.with_values(fn(*args, **kwargs))

        return Programs(strategy.mesh, call, lambda: _registry.usable_by(strategy))

    def _of_each_copy(self, var: Variable, result: Any) -> list[Any]:
        """What `update` returned, once for each copy of `var`."""
        versions = self._strategy.experimental_local_results(result)
        n = len(var.devices)
        return list(versions[:n]) if len(versions) >= n else [versions[0]] * n

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which variables are made on that variable's devices.

        The block is in the strategy's `scope()`. On-read variables have a copy on each
        replica's device all the same.

        Raises:
          ValueError: the variable belongs to another strategy, or to none.
          TypeError: it is not a variable.
          ContextError: in another strategy's scope.
        """
        self._check_own(colocate_with_variable, "colocate_vars_with", ordinary=False)
        return self._colocated(colocate_with_variable)

    @contextlib.contextmanager
    def _colocated(self, var: Variable) -> Iterator[None]:
        context = _contexts.current()
        _contexts.require_same(context, self._strategy)
        in_replica = context is not None and context.replica is not None
        scope = contextlib.nullcontext() if in_replica else self._strategy.scope()
        with scope, _step.colocated(var.mesh):
            yield

    def value_container(self, value: Any) -> Any:
        """What `value` is a part of: `value` itself, as copies are not apart here."""
        return value

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made in this strategy's `scope()`.

        Raises:
          TypeError: it is not a variable.
        """
        _check_variable(v, "variable_created_in_scope")
        if self._strategy.is_default:
            return v.strategy is None
        return v.strategy is self._strategy

    def _check_own(self, var: Any, method: str, ordinary: bool = True) -> None:
        _check_variable(var, method)
        if self.variable_created_in_scope(var) or (ordinary and var.strategy is None):
            return
        whose = "no strategy" if var.strategy is None else repr(var.strategy)
        raise ValueError(
            f"`extended.{method}` was given variable {var.name!r} of {whose}, not one "
            f"made in the scope of {self._strategy!r}. Make it in "
            "`with strategy.scope():`."
        )


def _check_variable(var: Any, method: str) -> None:
    if not isinstance(var, Variable):
        raise TypeError(
            f"`extended.{method}` was given {var!r}, a {type(var).__name__}; a "
            "jaxstrategy.Variable was wanted."
        )


def _check_same(args: Any, kwargs: Any) -> None:
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_values.is_whole)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise ValueError(
            "`extended.update` was given a PerReplica: each copy of the variable would "
            "be changed in another way. Reduce it first: "
            "`strategy.extended.reduce_to(op, value, destinations=var)`."
        )


def _at(var: Variable, arguments: Any) -> Any:
    """`arguments` with the arrays that lie elsewhere than `var` copied to its devices.

    JAX does not compute with arrays of different devices.
    """
    if var.strategy is None:
        return arguments

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return _mesh.put_same(leaf, _mesh.replicated(var.mesh))
        return leaf

    # Flax's objects would be copied, and what `fn` changes of them would be lost.
    return jax.tree.map(
        moved,
        arguments,
        is_leaf=lambda node: _values.is_whole(node) or is_changed_in_place(node),
    )


def _checked_pairs(pairs: Any) -> list[tuple[PyTree, Destinations]]:
    if isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        return [tuple(pair) for pair in pairs]
    raise ValueError(
        "Each element of `value_destination_pairs` should be a tuple of a value and "
        f"its destinations, got {pairs!r}."
    )


def _sharding(destinations: Destinations) -> jax.sharding.Sharding | None:
    """Where a result goes; None for where it is, on all replicas."""
    if isinstance(destinations, (str, Device)):
        return jax.sharding.SingleDeviceSharding(_devices.find(destinations))
    if isinstance(destinations, (list, tuple)):
        if not destinations:
            raise ValueError(
                "`destinations` is empty. Name a device, several, or give a value "
                "whose devices are meant."
            )
        return _mesh.replicated(_mesh.mesh_of(_devices.choose(destinations)))
    if isinstance(destinations, Variable):
        if _step.tracing() is not None:
            return None
        return _mesh.replicated(destinations.mesh)
    whole = not isinstance(destinations, PerReplica)
    value = destinations if whole else _values.contents(destinations)
    if isinstance(value, Tracer):
        return None
    if isinstance(value, jax.Array):
        return value.sharding if whole else _mesh.replicated_like(value.sharding)
    raise TypeError(
        f"`destinations` was {destinations!r}; a device, a device name, a list of "
        "them, a variable, a PerReplica or an array was wanted."
    )


def _placed(result: PyTree, sharding: jax.sharding.Sharding | None) -> PyTree:
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(result))
    if sharding is None or traced:
        return result
    return jax.tree.map(lambda leaf: _mesh.put(leaf, sharding), result)
