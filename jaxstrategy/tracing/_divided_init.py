"""State built in parts: no device has more of it than what it keeps and one array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias, final

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.sharding import NamedSharding

from jaxstrategy.processes import _job
from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._inner_placement import inner_dimensions, lying_like
from jaxstrategy.replicas._replicas import SAME, SPLIT, Replicas, lies_along
from jaxstrategy.tracing._constants import constants, fingerprint
from jaxstrategy.tracing._exact_in_parts import CALLS, exact_values, is_exact
from jaxstrategy.tracing._inner_state import InnerState
from jaxstrategy.tracing.jaxprs._visit import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    closed,
    jaxpr_of,
    plain,
)
from jaxstrategy.values import _building
from jaxstrategy.values._state_placement import shardings_of
from jaxstrategy.values._types import PyTree

# Of what is exact in parts, such as a random key, smaller ones are computed for all
# results at once. Larger ones are computed again for each, so that they need not stay.
_SHARED_BYTES = 65536

Known: TypeAlias = dict[Var, jax.Array]
"""Values of variables, on all replicas."""


def build_divided(
    build: Callable[..., tuple[PyTree, list[jax.Array]]],
    arrays: Sequence[jax.Array | np.ndarray | np.generic],
    replicas: Replicas,
    inner: InnerState,
    name: str,
) -> tuple[PyTree, list[jax.Array]]:
    """`build(*arrays)`, with each array of it placed as `replicas` keep their state.

    It is the same bit by bit as if each device had computed all. So what is not exact
    in parts is computed whole and then divided, one array after the other.

    Args:
      build: makes a state, and arrays `[replica, ...]`, of which each has its version.
      arrays: its arguments; those of the first process count.
      replicas: those of the strategy.
      inner: where its arrays lie on the devices of each replica.
      name: how other processes hear of it.
    """
    given = [
        _building.replicate_leaf(array, _place_of_input(array, replicas))
        for array in arrays
    ]
    traced, returned = jax.make_jaxpr(build, return_shape=True)(*given)
    state, versions = returned
    wanted = [sharding for _, _, sharding in shardings_of(inner.typed(state), replicas)]
    wanted += [replicas.sharding(SPLIT)] * len(versions)
    captured: list[jax.Array] = list(traced.consts)
    is_same = _is_same_everywhere(name, traced)
    if is_same:
        captured = [
            _mesh.place(value, _place_of_input(value, replicas)) for value in captured
        ]
    whole = replicas.sharding(SAME) if is_same else None
    programs = _Programs(plain(traced), [*captured, *given], wanted, whole)
    found = programs.results() if is_same else programs.of_first_process()
    return jax.tree.unflatten(jax.tree.structure(returned), found)


def _place_of_input(
    array: jax.Array | np.ndarray | np.generic, replicas: Replicas
) -> NamedSharding:
    """The placement of an argument or a constant, which may be a whole state."""
    assert replicas.state_sharding is not None, "the caller has looked"
    # It has no path of which the user's choice could tell.
    sharding = dataclasses.replace(replicas.state_sharding, dimension=None)
    taken = inner_dimensions(array, replicas)
    division = sharding.division("", array, replicas.parts, taken)
    return lying_like(array, replicas, lies_along(division.dimension))


def _is_same_everywhere(name: str, traced: ClosedJaxpr) -> bool:
    """Whether all processes have made the same program, with the same constants."""
    processes = _job.current()
    if processes is None or processes.count == 1:
        return True
    prints = fingerprint(name, traced)["prints"]
    heard = processes.operations.agree(f"build state by `{name}`", prints)
    return all(each == heard[0] for each in heard)


@final
class _Programs:
    """The programs that build one state.

    Args:
      jaxpr: all of it.
      inputs: its constants and its arguments, on all replicas.
      wanted: where its results are to lie.
      whole: where what is whole lies; None for JAX's default device.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[jax.Array],
        wanted: Sequence[NamedSharding],
        whole: NamedSharding | None,
    ) -> None:
        self._jaxpr = jaxpr
        self._wanted = wanted
        self._whole = whole
        given = [*jaxpr.constvars, *jaxpr.invars]
        self._known: Known = dict(zip(given, inputs, strict=True))
        self._programs: dict[Hashable, Callable[..., list[jax.Array]]] = {}

    def results(self) -> list[jax.Array]:
        """The results, in order."""
        exact = exact_values(self._jaxpr)
        outvars = self._jaxpr.outvars
        found = self._exact_results(exact)
        # Of what is whole anyway, one program makes all.
        small = [
            number
            for number, sharding in enumerate(self._wanted)
            if number not in found and sharding.is_fully_replicated
        ]
        made = self._made([outvars[number] for number in small])
        found |= dict(zip(small, made, strict=True))
        for number, sharding in enumerate(self._wanted):
            if number not in found:
                (value,) = self._made([outvars[number]])
                moved = _mesh.place(value, sharding)
                found[number] = jax.block_until_ready(moved)  # before the next is made
        return [found[number] for number in range(len(outvars))]

    def of_first_process(self) -> list[jax.Array]:
        """What the first process builds, sent to the others, one after the other."""
        self._known = {var: _here(value) for var, value in self._known.items()}
        found: list[jax.Array] = []
        for atom, sharding in zip(self._jaxpr.outvars, self._wanted, strict=True):
            (value,) = self._made([atom])
            found.append(_mesh.broadcast(value, sharding))
        return found

    def _exact_results(self, exact: set[Var]) -> dict[int, jax.Array]:
        """The results that are exact in parts, by number; and what others share."""
        outvars = self._jaxpr.outvars
        numbers = [i for i, atom in enumerate(outvars) if is_exact(atom, exact)]
        shared = _shared(self._jaxpr, exact)
        atoms = [*(outvars[number] for number in numbers), *shared]
        where = [self._wanted[number] for number in numbers]
        inputs = list(self._known)
        # With all equations, for what they do besides: a line that is printed.
        program = _function(jaxpr_of(inputs, self._jaxpr.eqns, atoms))
        jitted = jax.jit(program, out_shardings=where + [self._whole] * len(shared))
        made = jitted(*self._known.values())
        self._known |= dict(zip(shared, made[len(numbers) :], strict=True))
        return dict(zip(numbers, made, strict=False))

    def _made(self, atoms: Sequence[Atom]) -> list[jax.Array]:
        """Some results, whole, of arguments that are whole."""
        if not atoms:
            return []
        inputs, eqns = self._needed(atoms)
        jaxpr = jaxpr_of(inputs, eqns, atoms)
        key = _likeness(jaxpr)
        program = self._programs.get(key)
        if program is None:
            program = jax.jit(_function(jaxpr), out_shardings=self._whole)
            self._programs[key] = program
        return program(*(self._as_whole(self._known[var]) for var in inputs))

    def _as_whole(self, value: jax.Array) -> jax.Array:
        is_divided = isinstance(value, jax.Array) and _mesh.is_divided(value)
        return _mesh.place(value, self._whole) if self._whole and is_divided else value

    def _needed(self, atoms: Iterable[Atom]) -> tuple[list[Var], list[Equation]]:
        """The known variables and the equations that some results need, in order."""
        needed = {atom for atom in atoms if not isinstance(atom, Literal)}
        found: list[Equation] = []
        for eqn in reversed(self._jaxpr.eqns):
            made = [var for var in eqn.outvars if not isinstance(var, DropVar)]
            if not any(var in needed and var not in self._known for var in made):
                continue
            found.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        return [var for var in self._known if var in needed], found[::-1]


def _shared(jaxpr: Jaxpr, exact: set[Var]) -> list[Var]:
    """The small exact values that others are made of, which all of those share."""
    found: dict[Var, None] = {}
    inputs = {*jaxpr.constvars, *jaxpr.invars}
    for eqn in jaxpr.eqns:
        if not all(is_exact(var, exact) for var in eqn.outvars):
            found |= {
                atom: None
                for atom in eqn.invars
                if not isinstance(atom, Literal)
                and atom in exact
                and atom not in inputs
                and _bytes(atom) <= _SHARED_BYTES
            }
    return list(found)


def _likeness(jaxpr: Jaxpr) -> Hashable:
    """Equal for programs that do the same: layers of one kind are made by one."""
    if jaxpr.effects or any(_hides_something(eqn) for eqn in all_eqns(jaxpr)):
        return jaxpr  # equal to no other
    # JAX prints arrays in short.
    return str(jaxpr), tuple(_bits(constant.value) for constant in constants(jaxpr))


def _hides_something(eqn: Equation) -> bool:
    """Whether an equation may do something that it is printed without: a callback."""
    if eqn.primitive.name in CALLS:  # which know how to differentiate themselves
        return False
    return any(callable(param) for param in eqn.params.values())


def _bits(constant: jax.Array | np.ndarray | np.generic) -> Hashable:
    """Equal for equal numbers, and for one array."""
    return id(constant) if np.ndim(constant) else np.asarray(constant).tobytes()


def _bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _here(value: jax.Array) -> jax.Array:
    """What this process has of a value that each device has whole."""
    if not isinstance(value, jax.Array):
        return value
    if not value.is_fully_replicated:
        value = _mesh.place(value, _mesh.replicated_like(value.sharding))
    return value.addressable_data(0)


def _function(jaxpr: Jaxpr) -> Callable[..., list[jax.Array]]:
    return core.jaxpr_as_fun(closed(jaxpr))
