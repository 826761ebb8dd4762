"""The values in a program that are the same bit by bit if devices compute parts."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.tracing.jaxprs._visit import Atom, Equation, Jaxpr, Var, inner_jaxprs

# They move elements that are there.
_MOVE = frozenset(
    """
    bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p expand_dims
    iota name reshape select_n slice split squeeze stop_gradient transpose unstack
    """.split()
)
# Of whole numbers they are exact. Of others they are not: what is left at the end of a
# row is computed by other instructions than whole vectors are, and a part has another
# end (`log1p` and `erf_inv` on CPU, JAX 0.10 and 0.12); where XLA joins parts, it adds
# zeros to what other devices have, and -0.0 becomes 0.0.
_COMPUTE = frozenset(
    """
    add and clamp concatenate dynamic_slice eq gather ge gt le lt max min mul ne neg
    not or pad rev shift_left shift_right_arithmetic shift_right_logical stack sub
    threefry2x32 xor
    """.split()
)
_DRAW = frozenset(
    """
    random_bits random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap
    """.split()
)
# They compute what the function does that they hold.
CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call"))


def exact_values(jaxpr: Jaxpr) -> set[Var]:
    """The variables of `jaxpr` that are exact however devices divide them."""
    given = [*jaxpr.constvars, *jaxpr.invars]
    return _exact(jaxpr, given)


def _exact(jaxpr: Jaxpr, exact_inputs: Sequence[Var]) -> set[Var]:
    exact = set(exact_inputs)
    for eqn in jaxpr.eqns:
        found = _results(eqn, [is_exact(atom, exact) for atom in eqn.invars])
        made = zip(eqn.outvars, found, strict=True)
        exact.update(var for var, ok in made if ok)
    return exact


def is_exact(atom: Atom, exact: set[Var]) -> bool:
    """Whether `atom` is one of `exact`, or a constant of the program."""
    return isinstance(atom, Literal) or atom in exact


def _results(eqn: Equation, given: Sequence[bool]) -> list[bool]:
    if eqn.primitive.name in CALLS:
        inner = next(inner_jaxprs(eqn.params))
        own = zip(inner.invars, given, strict=True)
        exact = _exact(inner, [*inner.constvars, *(var for var, ok in own if ok)])
        return [is_exact(atom, exact) for atom in inner.outvars]
    ok = all(given) and not eqn.effects and _is_exact_operation(eqn)
    return [ok] * len(eqn.outvars)


def _is_exact_operation(eqn: Equation) -> bool:
    name, atoms = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
    if name in _COMPUTE:
        return not any(jnp.issubdtype(each.aval.dtype, jnp.inexact) for each in atoms)
    if name in _DRAW:
        # Keys of `rbg` draw what the device's generator gives, part by part.
        keys = [atom.aval.dtype for atom in atoms if is_key(atom.aval.dtype)]
        return all("fry" in str(dtype) for dtype in keys)
    return name in _MOVE
