"""Variables as the methods of 2018 read and change them: `ChangesVariables`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxstrategy.compat.contrib import _tower_values
from jaxstrategy.compat.contrib._has_towers import HasTowers
from jaxstrategy.replicas._devices import Device
from jaxstrategy.values._types import Function, PyTree
from jaxstrategy.variables._variable import Variable


class ChangesVariables(HasTowers):
    """The methods that read and change variables."""

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable; of a tower-local one what its copies are together.

        It has the shape of the variable.

        Raises:
          ContextError: of a tower-local variable, inside a tower.
          ValueError: of a tower-local variable without an aggregation.
          TypeError: it is no variable.
        """
        return _tower_values.read_variable(v)

    def fetch(
        self,
        val: PyTree,
        destination: Device | str | None = None,
        fn: Callable[[PyTree], PyTree] | None = None,
    ) -> PyTree:
        """`fn(val)`, or a copy of `val`, on one device.

        Args:
          val: a variable, or any value that is equal in all towers.
          destination: a device or its name; by default where `val` is.
          fn: a function of the value.

        Raises:
          ContextError: outside of cross-tower context.
          ValueError: there is no such device.
          TypeError: `destination` is none, or `fn` cannot be called; the value differs
            between towers, and is to be copied.
        """
        self._require_cross_tower("fetch")
        value = self.read_var(val) if isinstance(val, Variable) else val
        if fn is not None:
            _tower_values.require_function("fetch", fn)
            value = fn(value)
        if destination is None:
            return value
        _tower_values.require_equal("fetch", value)
        return self._core.extended.copy_to(value, destination)

    def update(
        self, var: Variable, fn: Function, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` to change each copy of a variable.

        In it, reading and assigning variables mean one copy of them. It is called once
        for all copies.

        Args:
          var: the variable.
          fn: changes it. What it returns is returned.
          *args: further arguments, equal in all towers: reduce them first.
          **kwargs: further keyword arguments. `grouped` is none of them: with False,
            each leaf of the result is a tuple with one entry for each copy.

        Raises:
          ContextError: outside of cross-tower context.
          TypeError: an argument differs between towers; `var` is no variable.
          ValueError: the variable belongs to another strategy.
        """
        self._require_cross_tower("update")
        _tower_values.require_function("update", fn)
        grouped = kwargs.pop("grouped", True)
        _tower_values.require_equal("update", (args, kwargs))
        return self._core.extended.update(var, fn, args, kwargs, group=bool(grouped))

    def update_non_slot(
        self, colocate_with: Any, fn: Function, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` to change an optimizer's state of no variable.

        Args:
          colocate_with: what `non_slot_devices` gave.
          fn: a function that changes each copy of the variables that it uses, as of
            `update`, once. What it returns is returned.
          *args: its arguments, equal in all towers.
          **kwargs: its keyword arguments. `grouped` as of `update`.

        Raises:
          ContextError: outside of cross-tower context.
          TypeError: an argument differs between towers; `colocate_with` names nothing.
        """
        self._require_cross_tower("update_non_slot")
        _tower_values.require_function("update_non_slot", fn)
        grouped = kwargs.pop("grouped", True)
        _tower_values.require_equal("update_non_slot", (args, kwargs))
        return self._core.extended.update_on(
            colocate_with, fn, args, kwargs, group=bool(grouped)
        )
