"""`strategy.extended`: reductions to devices, updates of variables, colocation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

import jax
from jax.core import Tracer

from jaxstrategy._src.contexts import context as _context, replica_context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import check_arguments
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.options import CommunicationOptions, ReduceOp
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas, sharded_along
from jaxstrategy._src.strategies.choices import Choices, check_function
from jaxstrategy._src.strategies.destinations import (
    CopyPlace,
    Destinations,
    check_logical_device,
    check_reduced,
    check_task,
    checked_pairs,
    copies_on,
)
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.trees import is_nnx_node
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.variable import Variable

ColocateWith: TypeAlias = Variable | Device | str | Sequence[Device | str]
"""A variable, or devices or their names."""


@final
class StrategyExtended:
    """Additional methods of a strategy, for library code and optimizers.

    It is `strategy.extended`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     w = js.Variable(1.0)
    >>> @strategy.run
    ... def step(x):
    ...     def apply(strategy, grad):
    ...         grad = strategy.extended.reduce_to("mean", grad, w)
    ...         strategy.extended.update(w, lambda w, g: w.assign_sub(g), (grad,))
    ...     js.get_replica_context().merge_call(apply, (x,))
    >>> step(strategy.per_replica([0.25, 0.75]))
    >>> float(w)
    0.5
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        executor: AbstractExecutor,
        choices: Choices,
    ) -> None:
        self._strategy = strategy
        self._executor = executor
        self._choices = choices

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that compute, in replica order.

        Of the default strategy JAX's first one, where TensorFlow raises an error.
        """
        return self._strategy.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that hold mirrored variables.

        Of the default strategy JAX's first one, where TensorFlow raises an error.
        """
        return self._strategy._parameter_replicas.devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one that saves checkpoints, in TensorFlow.

        `js.checkpoint` needs no such question: all processes call it.
        """
        return self._choices.saves

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one that writes metrics."""
        return self._choices.saves

    @property
    def experimental_should_init(self) -> bool:
        """Whether initial values that this process makes count."""
        choices = self._choices
        waits = choices.is_between_graph and choices.is_chief is not None
        return choices.saves or not waits

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process of the job runs the whole program."""
        processes = self._choices.processes
        several = processes is not None and processes.count > 1
        return several or self._choices.is_between_graph

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
          TypeError: as `reduce_to`.
          ContextError: inside `run`.
        """
        context = _context.require_cross_replica(
            self._strategy, "extended.batch_reduce_to"
        )
        pairs = checked_pairs(value_destination_pairs)
        places = [self._place(destinations) for _, destinations in pairs]
        op = ReduceOp(reduce_op)
        results = self._strategy.reduce(
            op, [value for value, _ in pairs], options=options
        )
        if context.in_step:
            return results
        return [
            place.placed(result) for place, result in zip(places, results, strict=True)
        ]

    def copy_to(self, value: PyTree, destinations: Destinations) -> PyTree:
        """Copies of `value`, one on each device of `destinations`.

        Args:
          value: a pytree of arrays and numbers, the same for all replicas; a variable
            stands for its value. Other leaves (strings, bools) stay as they are. With
            several processes it is that of the first process of `destinations`.
          destinations: as of `reduce_to`. While a step is traced (in `merge_call`, or
            under your own `jax.jit`) the value is on all replicas already, and comes
            back.

        Returns:
          The pytree with an array for each array or number, on one device or mirrored
          on several. One that lies there already comes back itself.

        Raises:
          ValueError: a leaf is a `PerReplica`; there is no destination, or no such
            device.
          TypeError: `destinations` names no devices.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable([1.0, 2.0])
        >>> x = strategy.extended.copy_to(3.0, v)
        >>> x, isinstance(x, js.Mirrored)
        (Array(3., dtype=float32, weak_type=True), True)
        >>> strategy.extended.copy_to(v, "CPU:1").devices()
        {CpuDevice(id=1)}
        """
        context = _context.require_cross_replica(self._strategy, "extended.copy_to")
        place = self._place(destinations)
        return place.copies(value, context.in_step)

    def update(
        self,
        var: Variable,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` to change each copy of a variable.

        In it, reading and assigning variables mean one copy of them, and aggregation
        plays no part. It is called once for all copies, in cross-replica context; if
        it comes to an on-read variable, outside a step, as one compiled program.

        Args:
          var: the variable.
          fn: changes it. What it returns is returned.
          args: further arguments, which are taken to where the copies are. For an
            on-read variable each copy gets its replica's version of a `PerReplica`.
            For a mirrored one reduce it first. In a step (in `merge_call`), where each
            array is a `PerReplica`, reduced or not, it is proved that the copies stay
            equal.
          kwargs: further keyword arguments.
          group: whether to return what `fn` did. If not, each leaf of that is a tuple:
            of arrays and variables with one entry for each copy in this process, of
            anything else, which is one for all copies, with that: `(3,)`, `(None,)`.

        Raises:
          ValueError: the copies of a mirrored variable would differ, because an
            argument is a `PerReplica` outside a step, or because what is assigned may
            differ; or the variable belongs to another strategy.
          TypeError: `var` is not a variable; `fn` cannot be called; `args` is not a
            tuple or list.
          ContextError: inside `run`; use `merge_call`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable(1.0)
        >>> strategy.extended.update(v, lambda v, a: v.assign_add(a), args=(2.0,))
        Array(3., dtype=float32)
        """
        context = _context.require_cross_replica(self._strategy, "extended.update")
        self._checked(var, "update")
        check_function(fn, "extended.update")
        check_arguments(args, kwargs)
        devices = tuple(dict.fromkeys(var.replicas.devices))
        arguments = (var, *args), dict(kwargs or {})
        if context.in_step:
            with jax.named_scope(replica_context.REPLICA_SCOPE):
                arguments = replica_context.to_replica(arguments)
                result = self._updated(devices, fn, arguments)
        elif var.copies_must_agree:
            check_reduced(arguments, "update")
            moved = _moved_to_variable(var, arguments)
            result = self._updated_at_once(devices, fn, moved)
        else:
            try:
                result = self._executor.update(devices, fn, arguments)
            except Exception as error:
                access.check_not_mapped(error, var.name)
                raise
        return result if group else self._of_each_copy(result, var.replicas)

    def update_on(
        self,
        destinations: Destinations,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` to change what is on some devices.

        As `update`, with no variable of its own: for what goes with no one variable, as
        a step counter of an optimizer. It is called once, in cross-replica context.
        Each variable that it changes is changed once, on all its copies.

        Args:
          destinations: as of `reduce_to`. Arrays among the arguments and the results
            are taken there. While a step is traced they are on all replicas, whatever
            is asked for.
          fn: changes variables. What it returns is returned.
          args: its arguments.
          kwargs: its keyword arguments.
          group: as of `update`, with one entry for each device of `destinations`.

        Raises:
          ValueError: an argument is a `PerReplica`, outside a step; or a mirrored
            variable is assigned what may differ between replicas; or there is no
            destination.
          TypeError: `destinations` names no devices; `fn` cannot be called; `args` is
            not a tuple or list.
          ContextError: inside `run`; use `merge_call`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     steps = js.Variable(0)
        >>> devices = strategy.extended.parameter_devices
        >>> strategy.extended.update_on(devices, lambda n: steps.assign_add(n), (2,))
        Array(2, dtype=int32)
        """
        context = _context.require_cross_replica(self._strategy, "extended.update_on")
        check_function(fn, "extended.update_on")
        check_arguments(args, kwargs)
        place = self._place(destinations)
        arguments = tuple(args), dict(kwargs or {})
        if context.in_step:
            arguments = replica_context.to_replica(arguments)
            result = self._updated(place.devices, fn, arguments)
            replicas = self._strategy._replicas
        else:
            check_reduced(arguments, "update_on")
            arguments = place.with_arrays(arguments)
            result = self._updated_at_once(place.devices, fn, arguments)
            result, replicas = place.with_arrays(result), place.replicas
        return result if group else self._of_each_copy(result, replicas)

    def colocate_vars_with(
        self, colocate_with_variable: ColocateWith
    ) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which variables are made on that variable's devices.

        On-read variables have a copy on each replica's device all the same.

        Args:
          colocate_with_variable: a variable of the strategy; or a device or its name,
            or several, such as `extended.parameter_devices`.

        Raises:
          ValueError: the variable belongs to another strategy, or to none; there is no
            such device; devices are given, and variables are on parameter servers, or
            have one copy and would need several.
          TypeError: it is neither a variable nor devices.
          ContextError: outside the strategy's `scope()`, or in another strategy's.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope(), strategy.extended.colocate_vars_with("CPU:1"):
        ...     v = js.Variable(1.0)
        >>> v.devices
        (CpuDevice(id=1),)
        """
        value = colocate_with_variable
        if isinstance(value, (str, Device, list, tuple)):
            replicas = self._place(value).replicas
            self._strategy._variable_policy.check_devices(replicas.devices)
            return self._colocated(replicas)
        return self._colocated(
            self._checked(value, "colocate_vars_with", ordinary=False)
        )

    def value_container(self, value: object) -> object:
        """The variable that `value` is a copy of; else `value` itself.

        Copies are what `experimental_local_results(variable)` gives. A copy is known as
        long as it is held: `experimental_local_results(value_container(copy))` holds
        the same object until the variable changes.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable(1.0)
        >>> first, second = strategy.experimental_local_results(v)
        >>> strategy.extended.value_container(second) is v
        True
        """
        owner = access.owner_of(value)
        return value if owner is None else owner

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v`, or the variable that it is a copy of, was made in the scope.

        Raises:
          TypeError: it is neither a variable nor a copy of one.
        """
        variable = _checked_variable(
            self.value_container(v), "variable_created_in_scope"
        )
        are_owned = self._strategy._variable_policy.are_owned
        return variable.strategy is (self._strategy if are_owned else None)

    @contextlib.contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """A `with` block for what is on one logical device, in TensorFlow's programs.

        It changes nothing: all of a replica's devices compute one program, and XLA
        chooses where what is not divided is computed.

        >>> import jaxstrategy as js
        >>> _ = js.simulate(8)
        >>> strategy = js.TPUStrategy(cores_per_replica=2)
        >>> with strategy.scope(), strategy.extended.experimental_logical_device(1):
        ...     w = js.Variable(3.0)
        """
        check_logical_device(logical_device_id, self._strategy._replicas)
        yield

    def _place(self, destinations: Destinations) -> CopyPlace:
        check_task(destinations, self._choices)
        return copies_on(destinations, self._strategy._replicas)

    def _checked(self, value: object, method: str, ordinary: bool = True) -> Variable:
        """`value`, a variable of this strategy; an `ordinary` one has no strategy."""
        var = _checked_variable(value, method)
        if self.variable_created_in_scope(var) or (ordinary and var.strategy is None):
            return var
        whose = "no strategy" if var.strategy is None else repr(var.strategy)
        raise ValueError(
            f"`extended.{method}` was given variable {var.name!r} of {whose}, not one "
            f"made in the scope of {self._strategy!r}. Make it in "
            "`with strategy.scope():`."
        )

    @contextlib.contextmanager
    def _colocated(self, beside: Variable | Replicas) -> Iterator[None]:
        context = _context.current()
        _context.require_same(context, self._strategy)
        if context.strategy is None and self._strategy._variable_policy.are_owned:
            raise ContextError(
                "`extended.colocate_vars_with` was called outside of the scope of "
                f"{self._strategy!r}, where variables are no strategy's. Write `with "
                "strategy.scope(), strategy.extended.colocate_vars_with(v):`."
            )
        with _context.entered(colocated=beside):
            yield

    def _updated(
        self, devices: tuple[Device, ...], fn: Function, arguments: Arguments
    ) -> PyTree:
        args, kwargs = arguments
        with self._strategy.scope(), _context.entered(updated=devices):
            return fn(*args, **kwargs)

    def _updated_at_once(
        self, devices: tuple[Device, ...], fn: Function, arguments: Arguments
    ) -> PyTree:
        """Updates all copies, which are equal, as one array.

        Starts again as a compiled program if `fn` uses a variable with versions.
        """
        try:
            with access.undone_for_program():
                return self._updated(devices, fn, arguments)
        except access.NeedsProgram:
            pass
        return self._executor.update(devices, fn, arguments)

    def _of_each_copy(self, result: PyTree, replicas: Replicas) -> PyTree:
        """`result` with a tuple of a version for each copy, or of one, at each leaf."""
        in_step = _context.current().in_step
        count = replicas.count if in_step else len(replicas.local_ids)

        def versions(leaf: Leaf) -> tuple[Leaf, ...]:
            if not isinstance(leaf, (jax.Array, PerReplica, Handle)):
                return (leaf,)
            results = self._strategy.experimental_local_results(leaf)
            return results[:count] if len(results) >= count else (results[0],) * count

        return jax.tree.map(
            versions, result, is_leaf=lambda node: node is None or _is_whole(node)
        )


def _checked_variable(var: object, method: str) -> Variable:
    """`var`, given to a method of `strategy.extended`."""
    if not isinstance(var, Variable):
        raise TypeError(
            f"`extended.{method}` was given {var!r}, a {type(var).__name__}; a "
            "jaxstrategy.Variable was wanted."
        )
    return var


def _is_whole(node: object) -> bool:
    # Flax's objects would be copied, and what `fn` changes of them would be lost.
    return trees.is_whole(node) or is_nnx_node(node)


def _moved_to_variable(var: Variable, arguments: PyTree) -> PyTree:
    """`arguments` with arrays on other devices copied to those of `var`.

    JAX does not compute with arrays of different devices.
    """
    if var.strategy is None:
        return arguments
    replicas = var.replicas

    def moved(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        where = var.sharding  # sharded if the variable is
        if leaf.shape != var.shape:
            where = replicas.sharding(sharded_along(replicas.dimension_of(leaf)))
        return mesh.broadcast(leaf, where)

    return jax.tree.map(moved, arguments, is_leaf=_is_whole)
