"""Reductions to chosen devices, and variables: `strategy.extended`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._errors import ContextError
from jaxstrategy._options import ReduceOp
from jaxstrategy.contexts import (
    _context,
    _replica_context,
)
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.executors._executor import AbstractExecutor
from jaxstrategy.replicas import (
    _mesh,
)
from jaxstrategy.replicas._devices import Device
from jaxstrategy.strategies._calls import check_arguments
from jaxstrategy.strategies._destinations import (
    Destinations,
    checked_pairs,
    placed,
    sharding_of,
)
from jaxstrategy.strategies._logical_placement import check_logical_device
from jaxstrategy.strategies._process_role import ProcessRole
from jaxstrategy.tracing.nnx._adapter import is_changed_in_place
from jaxstrategy.values import _trees
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import (
    Function,
    Leaf,
    PyTree,
)
from jaxstrategy.variables import (
    _access,
    _components,
)
from jaxstrategy.variables._variable import Variable


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
        role: ProcessRole | None = None,
    ) -> None:
        self._strategy = strategy
        self._executor = executor
        self._role = role or ProcessRole()

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that compute, in replica order."""
        return self._strategy.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that hold mirrored variables."""
        return self._strategy.parameter_replicas.devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one that saves checkpoints, in TensorFlow.

        `js.checkpoint` needs no such question: all processes call it.
        """
        return self._role.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one that writes metrics."""
        return self._role.is_chief

    @property
    def experimental_should_init(self) -> bool:
        """Whether initial values that this process makes count."""
        return self._role.is_chief or not self._role.waits

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process of the job runs the whole program."""
        return self._role.is_between_graph

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
        shardings = [sharding_of(destinations) for _, destinations in pairs]
        op = ReduceOp(reduce_op)
        results = self._strategy.reduce(
            op, [value for value, _ in pairs], options=options
        )
        if context.in_step:
            return results
        return [
            placed(result, sharding)
            for result, sharding in zip(results, shardings, strict=True)
        ]

    @contextlib.contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """A `with` block for what is on one logical device, in TensorFlow's programs.

        It changes nothing: all of a replica's devices compute one program, and XLA
        chooses where what is not divided is computed.

        Args:
          logical_device_id: the number of a device of each replica.

        Raises:
          ValueError: a replica has no such device.

        >>> import jaxstrategy as js
        >>> _ = js.simulate(8)
        >>> strategy = js.TPUStrategy(cores_per_replica=2)
        >>> with strategy.scope(), strategy.extended.experimental_logical_device(1):
        ...     w = js.Variable(3.0)
        """
        check_logical_device(logical_device_id, self._strategy.replicas)
        yield

    # Variables.

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
          group: whether to return what `fn` did. If not, each leaf of that is a tuple
            with one entry for each copy in this process, and None is `(None,)`.

        Raises:
          ValueError: the copies of a mirrored variable would differ, because an
            argument is a `PerReplica` outside a step, or because what is assigned may
            differ; or the variable belongs to another strategy.
          TypeError: `var` is not a variable; `args` is not a tuple or list.
          ContextError: inside `run`; use `merge_call`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable(1.0)
        >>> strategy.extended.update(v, lambda v, a: v.assign_add(a), args=(2.0,))
        Array(3., dtype=float32)
        """
        context = _context.require_cross_replica(self._strategy, "extended.update")
        self._check_own(var, "update")
        check_arguments(args, kwargs)
        arguments = tuple(args), dict(kwargs or {})
        if context.in_step:
            result = self._updated(var, fn, *_replica_context.to_replica(arguments))
        elif var.copies_must_agree:
            _check_same(arguments)
            result = self._updated_at_once(var, fn, *_at(var, arguments))
        else:
            positional, named = arguments
            result = self._executor.update(fn, (var, *positional), named)
        return result if group else self._of_each_copy(var, result, context.in_step)

    def _updated(
        self,
        var: Variable,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        with self._strategy.scope(), _context.entered(is_update=True):
            return fn(var, *args, **kwargs)

    def _updated_at_once(
        self,
        var: Variable,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """An update of all copies, which are equal, as of one array.

        If it comes to one of several copies, it starts again as a program.
        """
        try:
            with _access.undone_for_program():
                return self._updated(var, fn, args, kwargs)
        except _access.NeedsProgram:
            pass
        return self._executor.update(fn, (var, *args), kwargs)

    def _of_each_copy(self, var: Variable, result: PyTree, in_step: bool) -> PyTree:
        """The result of `update` with a tuple at each leaf, one entry per copy."""
        n = var.replicas.count if in_step else len(var.replicas.own)

        def versions(leaf: Leaf) -> tuple[Leaf, ...]:
            if leaf is None:
                return (None,)
            found = self._strategy.experimental_local_results(leaf)
            return found[:n] if len(found) >= n else (found[0],) * n

        return jax.tree.map(
            versions,
            result,
            is_leaf=lambda node: (
                node is None or _trees.is_whole(node) or is_changed_in_place(node)
            ),
        )

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which variables are made on that variable's devices.

        On-read variables have a copy on each replica's device all the same.

        Raises:
          ValueError: the variable belongs to another strategy, or to none.
          TypeError: it is not a variable.
          ContextError: outside the strategy's `scope()`, or in another strategy's.
        """
        self._check_own(colocate_with_variable, "colocate_vars_with", ordinary=False)
        return self._colocated(colocate_with_variable)

    @contextlib.contextmanager
    def _colocated(self, var: Variable) -> Iterator[None]:
        context = _context.current()
        _context.require_same(context, self._strategy)
        if context.strategy is None and self._strategy.variable_policy.are_owned:
            raise ContextError(
                "`extended.colocate_vars_with` was called outside of the scope of "
                f"{self._strategy!r}, where variables are no strategy's. Write `with "
                "strategy.scope(), strategy.extended.colocate_vars_with(v):`."
            )
        with _context.entered(colocated=var):
            yield

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
        owner = _components.owner_of(value)
        return value if owner is None else owner

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made in this strategy's `scope()`.

        Raises:
          TypeError: it is not a variable.
        """
        variable = _checked_variable(v, "variable_created_in_scope")
        are_owned = self._strategy.variable_policy.are_owned
        return variable.strategy is (self._strategy if are_owned else None)

    def _check_own(self, given: object, method: str, ordinary: bool = True) -> None:
        var = _checked_variable(given, method)
        if self.variable_created_in_scope(var) or (ordinary and var.strategy is None):
            return
        whose = "no strategy" if var.strategy is None else repr(var.strategy)
        raise ValueError(
            f"`extended.{method}` was given variable {var.name!r} of {whose}, not one "
            f"made in the scope of {self._strategy!r}. Make it in "
            "`with strategy.scope():`."
        )


def _checked_variable(var: object, method: str) -> Variable:
    if not isinstance(var, Variable):
        raise TypeError(
            f"`extended.{method}` was given {var!r}, a {type(var).__name__}; a "
            "jaxstrategy.Variable was wanted."
        )
    return var


def _check_same(arguments: PyTree) -> None:
    leaves = jax.tree.leaves(arguments, is_leaf=_trees.is_whole)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise ValueError(
            "`extended.update` was given a PerReplica: each copy of the variable would "
            "be changed in another way. Reduce it first: "
            "`strategy.extended.reduce_to(op, value, destinations=var)`."
        )


def _at(var: Variable, arguments: PyTree) -> PyTree:
    """`arguments` with the arrays that lie elsewhere than `var` copied to its devices.

    JAX does not compute with arrays of different devices.
    """
    if var.strategy is None:
        return arguments

    def moved(leaf: Leaf) -> Leaf:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return _mesh.broadcast(leaf, _beside(var, leaf))
        return leaf

    # Flax's objects would be copied, and what `fn` changes of them would be lost.
    return jax.tree.map(
        moved,
        arguments,
        is_leaf=lambda node: _trees.is_whole(node) or is_changed_in_place(node),
    )


def _beside(var: Variable, array: jax.Array) -> NamedSharding:
    """The place of an array that changes `var`: in parts if the variable is."""
    if array.shape == var.shape:
        return var.sharding
    dimension = var.replicas.dimension_of(array)
    return var.replicas.sharding_along(dimension)
