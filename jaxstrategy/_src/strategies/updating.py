"""Changes of each copy of variables: `UpdatesVariables`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxstrategy._src.contexts import context as _context, replica_context
from jaxstrategy._src.contexts.call_arguments import check_arguments
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.strategies.calls import check_function
from jaxstrategy._src.strategies.destinations import Destinations, check_reduced
from jaxstrategy._src.strategies.extending import ExtendsStrategy
from jaxstrategy._src.tracing.nnx.adapter import is_changed_in_place
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Function, Leaf, PyTree
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.variable import Variable


class UpdatesVariables(ExtendsStrategy):
    """The methods of `strategy.extended` that change variables."""

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
        self._own(var, "update")
        check_function(fn, "extended.update")
        check_arguments(args, kwargs)
        devices = _each_once(var.replicas)
        arguments = (var, *args), dict(kwargs or {})
        if context.in_step:
            with jax.named_scope(replica_context.REPLICA_SCOPE):
                arguments = replica_context.to_replica(arguments)
                result = self._updated(devices, fn, *arguments)
        elif var.copies_must_agree:
            check_reduced(arguments, "update")
            result = self._updated_at_once(devices, fn, *_at(var, arguments))
        else:
            try:
                result = self._executor.update(devices, fn, *arguments)
            except Exception as error:
                access.check_not_mapped(error, var.name)
                raise
        if group:
            return result
        return self._of_each_copy(result, _count(var.replicas, context.in_step))

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
            result = self._updated(place.devices, fn, *arguments)
            replicas = self._strategy._replicas
        else:
            check_reduced(arguments, "update_on")
            arguments = place.with_arrays(arguments)
            result = self._updated_at_once(place.devices, fn, *arguments)
            result, replicas = place.with_arrays(result), place.replicas
        if group:
            return result
        return self._of_each_copy(result, _count(replicas, context.in_step))

    def _updated(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        with self._strategy.scope(), _context.entered(updated=devices):
            return fn(*args, **kwargs)

    def _updated_at_once(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """An update of all copies, which are equal, as of one array.

        If it comes to one of several copies, it starts again as a program.
        """
        try:
            with access.undone_for_program():
                return self._updated(devices, fn, args, kwargs)
        except access.NeedsProgram:
            pass
        return self._executor.update(devices, fn, args, kwargs)

    def _of_each_copy(self, result: PyTree, count: int) -> PyTree:
        """A result with a tuple at each leaf: so many entries, or one for all."""

        def versions(leaf: Leaf) -> tuple[Leaf, ...]:
            if not isinstance(leaf, (jax.Array, PerReplica, Handle)):
                return (leaf,)
            found = self._strategy.experimental_local_results(leaf)
            return found[:count] if len(found) >= count else (found[0],) * count

        return jax.tree.map(
            versions,
            result,
            is_leaf=lambda node: (
                node is None or trees.is_whole(node) or is_changed_in_place(node)
            ),
        )


def _each_once(replicas: Replicas) -> tuple[Device, ...]:
    """The devices of copies, of which replicas may share some."""
    return tuple(dict.fromkeys(replicas.devices))


def _count(replicas: Replicas, in_step: bool) -> int:
    """The number of copies, outside of a step those of this process."""
    return replicas.count if in_step else len(replicas.own)


def _at(var: Variable, arguments: PyTree) -> PyTree:
    """`arguments` with the arrays that lie elsewhere than `var` copied to its devices.

    JAX does not compute with arrays of different devices.
    """
    if var.strategy is None:
        return arguments

    def moved(leaf: Leaf) -> Leaf:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return mesh.broadcast(leaf, _beside(var, leaf))
        return leaf

    # Flax's objects would be copied, and what `fn` changes of them would be lost.
    return jax.tree.map(
        moved,
        arguments,
        is_leaf=lambda node: trees.is_whole(node) or is_changed_in_place(node),
    )


def _beside(var: Variable, array: jax.Array) -> NamedSharding:
    """The place of an array that changes `var`: in parts if the variable is."""
    if array.shape == var.shape:
        return var.sharding
    dimension = var.replicas.dimension_of(array)
    return var.replicas.sharding_along(dimension)
