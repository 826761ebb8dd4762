"""Functions with rules of their own, of replicas that share a device.

Of `jax.custom_jvp` and `jax.custom_vjp` a trace holds the rules as functions of Python,
which JAX calls when somebody differentiates the whole program, and without the names of
the axes of `jax.vmap` (0.10 and 0.12). A collective in them would be that of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend import core

from jaxstrategy.tracing._jaxpr_types import Equation, Jaxpr
from jaxstrategy.tracing.lanes._lane_axes import LaneAxes
from jaxstrategy.tracing.lanes._one_equation import function_of
from jaxstrategy.tracing.replication._collective_table import is_along
from jaxstrategy.tracing.replication._jaxprs import all_eqns, closed
from jaxstrategy.values._types import Function, Leaf

OnLanes: TypeAlias = Callable[[Jaxpr], Jaxpr]
"""Of a jaxpr of one replica, without constants, that of one lane."""

_OverLanes: TypeAlias = Callable[[Function, Sequence[int | None]], Function]
"""Of a function of one lane, and the dimension of lanes of each of its operands, that
of all lanes."""


@final
class LaneDerivatives:
    """What takes the place of functions whose rules have collectives.

    Args:
      axes: of the replicas.
      on_lanes: rewrites what the rules compute.
    """

    def __init__(self, axes: LaneAxes, on_lanes: OnLanes) -> None:
        self._axes = axes
        self._on_lanes = on_lanes

    def in_place_of(self, eqn: Equation) -> Function | None:
        """The function that takes the place of an equation; None: it stays."""
        if eqn.primitive.name == "custom_jvp_call":
            return self._forward(eqn)
        if eqn.primitive.name in ("custom_vjp_call", "custom_vjp_call_jaxpr"):
            return self._backward(eqn)
        return None

    def _forward(self, eqn: Equation) -> Function | None:
        """A function that is differentiated as a `jax.custom_jvp`."""
        whole = function_of(eqn)
        count = len(eqn.invars)

        def derivative(*operands: jax.Array) -> list[jax.Array]:
            of_some, some = _of_inexact(whole, operands[:count])
            results, found = jax.jvp(of_some, some, list(operands[count:]))
            return [*results, *filter(_is_inexact, found)]

        operands = _types(eqn.invars)
        on_lane = self._with_collectives(
            derivative, [*operands, *filter(_is_inexact, operands)]
        )
        if on_lane is None:
            return None

        def of_lanes(
            over_lanes: _OverLanes, axes: Sequence[int | None]
        ) -> Callable[..., Any]:
            function = jax.custom_jvp(over_lanes(_of_call(eqn), axes))

            @function.defjvp
            def _rule(primals: Sequence[Leaf], tangents: Sequence[Leaf]) -> Any:
                own = [i for i, x in enumerate(primals) if _is_inexact(x)]
                all_axes = [*axes, *(axes[i] for i in own)]
                found = over_lanes(on_lane, all_axes)(
                    *primals, *(tangents[i] for i in own)
                )
                results = found[: len(eqn.outvars)]
                return results, _with_none(results, found[len(results) :])

            return function

        return self._function_of_lanes(eqn, of_lanes)

    def _backward(self, eqn: Equation) -> Function | None:
        """A function that is differentiated as a `jax.custom_vjp`."""
        whole = function_of(eqn)
        count = len(eqn.invars)

        def forward(*operands: jax.Array) -> list[jax.Array]:
            of_some, some = _of_inexact(whole, operands)
            return jax.vjp(of_some, *some)[0]

        # What the rule keeps for the backward pass is computed again.
        def gradients(*operands: jax.Array) -> Sequence[jax.Array]:
            of_some, some = _of_inexact(whole, operands[:count])
            results, pull = jax.vjp(of_some, *some)
            return pull(_with_none(results, operands[count:]))

        operands, results = _types(eqn.invars), _types(eqn.outvars)
        on_lane = self._with_collectives(
            gradients, [*operands, *filter(_is_inexact, results)]
        )
        if on_lane is None:
            return None
        forward_on_lane = self._on_lane(
            jax.make_jaxpr(forward, axis_env=self._axes.of_steps)(*operands)
        )

        def of_lanes(
            over_lanes: _OverLanes, axes: Sequence[int | None]
        ) -> Callable[..., Any]:
            function = jax.custom_vjp(over_lanes(_of_call(eqn), axes))

            def first(*given: jax.Array) -> tuple[Any, Any]:
                return over_lanes(forward_on_lane, axes)(*given), given

            def second(given: Sequence[jax.Array], cotangents: Any) -> Any:
                some = list(filter(_is_inexact, cotangents))
                all_axes = [*axes, *(0 for _ in some)]
                found = iter(over_lanes(on_lane, all_axes)(*given, *some))
                # Of what all lanes have in common, the gradient is that of all.
                return tuple(
                    (next(found) if axis == 0 else next(found).sum(0, dtype=x.dtype))
                    if _is_inexact(x)
                    else None
                    for x, axis in zip(given, axes, strict=True)
                )

            function.defvjp(first, second)
            return function

        return self._function_of_lanes(eqn, of_lanes)

    def _function_of_lanes(
        self,
        eqn: Equation,
        of_lanes: Callable[[_OverLanes, Sequence[int | None]], Function],
    ) -> Function:
        """A function of one lane which `jax.vmap` takes for that of all lanes."""
        function, lanes = _of_call(eqn), self._axes.lanes

        @custom_vmap
        def called(_: jax.Array, *operands: jax.Array) -> list[jax.Array]:
            return function(*operands)

        @called.def_vmap
        def _of_all(
            size: int, is_batched: list[bool], _: jax.Array, *operands: jax.Array
        ) -> tuple[list[jax.Array], list[bool]]:
            def over_lanes(one: Function, axes: Sequence[int | None]) -> Function:
                return jax.vmap(one, tuple(axes), axis_name=lanes, axis_size=size)

            axes = [0 if batched else None for batched in is_batched[1:]]
            results = of_lanes(over_lanes, axes)(*operands)
            return results, [True] * len(results)

        # The number of the lane makes JAX ask, whatever the lanes have in common.
        return lambda *operands: called(self._axes.lane(), *operands)

    def _with_collectives(
        self, rule: Function, types: Sequence[jax.ShapeDtypeStruct]
    ) -> Function | None:
        """What a rule computes on one lane; None of one without collectives."""
        try:
            made = jax.make_jaxpr(rule, axis_env=self._axes.of_steps)(*types)
        except Exception:  # anybody's code, which nobody may call
            return None
        known = [self._axes.replicas]
        if not any(is_along(each, known) for each in all_eqns(made.jaxpr)):
            return None
        return self._on_lane(made)

    def _on_lane(self, made: Any) -> Function:
        """What a traced function computes on one lane."""

        # Not before somebody calls it: a rule may use the function that it is for.
        @functools.cache
        def evaluate() -> Function:
            jaxpr = made.jaxpr
            inputs = [*jaxpr.constvars, *jaxpr.invars]
            whole = jaxpr.replace(constvars=[], invars=inputs)
            return core.jaxpr_as_fun(closed(self._on_lanes(whole)))

        return lambda *operands: evaluate()(*made.consts, *operands)


def _of_call(eqn: Equation) -> Function:
    """The function itself, without its rules."""
    return core.jaxpr_as_fun(eqn.params["call_jaxpr"])


def _of_inexact(
    function: Function, operands: Sequence[jax.Array]
) -> tuple[Function, list[jax.Array]]:
    """A function of those operands only that have derivatives, and these operands."""
    places = [i for i, x in enumerate(operands) if _is_inexact(x)]

    def called(*some: jax.Array) -> list[jax.Array]:
        own = dict(zip(places, some, strict=True))
        return function(*(own.get(i, x) for i, x in enumerate(operands)))

    return called, [operands[place] for place in places]


def _with_none(values: Sequence[jax.Array], some: Sequence[jax.Array]) -> list[Leaf]:
    """`some` for the values that have derivatives, and nothing for the others."""
    found = iter(some)
    return [
        next(found) if _is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in values
    ]


def _types(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in atoms]


def _is_inexact(value: Leaf) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
