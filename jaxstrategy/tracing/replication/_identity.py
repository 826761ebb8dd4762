"""Values known by what makes them: the same value twice, or the ids of replicas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jax.extend.core import Literal

from jaxstrategy.tracing._jaxpr_types import Atom, Equation
from jaxstrategy.tracing.replication._analysis import Frame
from jaxstrategy.tracing.replication._shares import FORMING

_COMPARING: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_COMPUTING: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
}  # fmt: skip


def are_one(frame: Frame, atoms: Sequence[Atom]) -> bool:
    """Whether `atoms` are the same value, bit by bit."""
    return len({_name(frame, atom) for atom in atoms}) == 1


def repeats(frame: Frame, atoms: Sequence[Atom]) -> tuple[int, ...]:
    """For each of `atoms` the first that is the same value; () if none is another."""
    numbers: dict[Hashable, int] = {}
    firsts = tuple(
        numbers.setdefault(_name(frame, atom), index)
        for index, atom in enumerate(atoms)
    )
    return firsts if len(numbers) < len(firsts) else ()


def _name(frame: Frame, atom: Atom) -> Hashable:
    """Equal for what is the same value, bit by bit."""
    if isinstance(atom, Literal):
        # By its bits: NaN is not equal to itself, and 0.0 is equal to -0.0.
        return str(atom.aval), np.asarray(atom.val).tobytes()
    eqn = frame.origins.get(atom)
    if eqn is None or eqn.primitive.name not in FORMING:
        return frame.names.get(atom, atom)
    of = tuple(_name(frame, each) for each in eqn.invars)
    return eqn.primitive.name, str(eqn.params), of


def compared_ids(frame: Frame, eqn: Equation) -> list[bool] | None:
    """The outcome on each replica of a comparison of their ids with literals."""
    compare = _COMPARING.get(eqn.primitive.name)
    sides = [_ids(frame, atom) for atom in eqn.invars]
    if compare is None or any(side is None for side in sides):
        return None
    return compare(*sides).tolist()


def _ids(frame: Frame, atom: Atom) -> np.ndarray | None:
    """The value of `atom` on each replica, if literals and the id tell it."""
    replicas = frame.analysis.replicas
    if isinstance(atom, Literal):
        return np.full(replicas, atom.val) if np.shape(atom.val) == () else None
    eqn = frame.origins.get(atom)
    if eqn is None:
        return None
    if eqn.primitive.name == "axis_index":
        is_along = frame.analysis.mentions_replicas(eqn)
        return np.arange(replicas, dtype=np.int32) if is_along else None
    # JAX makes `0 + 1 * id` of the id along several axes of which there is one.
    compute = _COMPUTING.get(eqn.primitive.name)
    if compute is None or sum(isinstance(side, Literal) for side in eqn.invars) != 1:
        return None
    sides = [_ids(frame, side) for side in eqn.invars]
    if any(side is None for side in sides):
        return None
    return compute(*sides).astype(np.int32)  # as JAX's ids are
