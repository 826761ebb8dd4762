"""The arrays that a step has captured, and its likeness in other processes.

To JAX they are part of the program, or arguments like those of the user. Nothing says
that each process has captured the same: a number of the process itself, read from a
file or drawn at random, is as good.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.core import Tracer
from jax.export import Exported
from jax.extend.core import Literal

from jaxstrategy._src.processes.agreement import ProgramPrint
from jaxstrategy._src.replicas.inner_axes import own_copy
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text.shown import array_type
from jaxstrategy._src.tracing.jaxprs.visit import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    closed_jaxprs,
    plain,
)
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.values.arrays import Leaf

# Where objects lie in memory.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Where a line of a module came from: the files and lines that called the exporter too.
_PLACE = re.compile(r' loc\((?:#loc\d*|unknown|"(?:[^"\\]|\\.)*")\)|^#loc.*\n', re.M)


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that a step has captured."""

    value: Leaf
    site: Site | None

    @property
    def print(self) -> str:
        """Equal in all processes that captured the same."""
        return f"{_type(self.value)} {_print_of(self.value)}"

    @property
    def description(self) -> str:
        """For messages."""
        line = self.site and self.site.line
        where = f", used at {line}" if line else ""
        return f"{_type(self.value)}{where}"


@dataclasses.dataclass(frozen=True)
class Given:
    """An argument that is the same in all processes, or should be."""

    label: str
    value: Leaf

    @property
    def is_captured(self) -> bool:
        """Whether the step has captured it."""
        return self.label.startswith("`captured ")

    @property
    def is_unshared(self) -> bool:
        """Whether each process has placed it by itself: then it may differ."""
        if isinstance(self.value, Tracer):
            return False
        if not isinstance(self.value, jax.Array):
            return True
        return not self.value.is_deleted() and self.value.is_fully_addressable

    @property
    def print(self) -> str:
        """Equal in all processes that were given the same."""
        bits = _print_of(_array(self.value)) if self.is_unshared else ""
        return f"{self._kind} {bits}"

    @property
    def description(self) -> str:
        """For messages."""
        what = self.label if self.is_captured else f"argument {self.label}"
        return f"{self._kind}, {what}"

    def used_in(self, jaxpr: ClosedJaxpr, index: int) -> str:
        """For messages, with the line of `jaxpr` that uses its input `index` first."""
        site = _site(first_use(jaxpr, plain(jaxpr).invars[index]), ())
        return self.description + (f", used at {site.line}" if site else "")

    @property
    def _kind(self) -> str:
        return _type(_array(self.value))


def _type(array: jax.Array | np.ndarray | np.generic) -> str:
    return array_type(array.dtype, array.shape, ", ")


def _array(value: Leaf) -> jax.Array | np.ndarray:
    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)


def constants(jaxpr: ClosedJaxpr) -> Iterator[Constant]:
    """The constants of `jaxpr`, and of functions, branches and loops in it."""
    yield from _constants(jaxpr, (), set())


def fingerprint(
    name: str, jaxpr: ClosedJaxpr, given: Mapping[int, Given] | None = None
) -> ProgramPrint:
    """A print of a program, equal in all processes that have made the same, as JSON."""
    found = [*constants(jaxpr), *(given or {}).values()]
    told = [each.description for each in constants(jaxpr)]
    told += [each.used_in(jaxpr, index) for index, each in (given or {}).items()]
    code = zlib.crc32(code_of(plain(jaxpr)))
    return {
        "name": name,
        "prints": [f"{code:08x}", *(each.print for each in found)],
        "captured": told,
    }


def code_of(jaxpr: Jaxpr) -> bytes:
    """Equal for steps that compute the same from their captured arrays."""
    modules = [
        _PLACE.sub("", value.mlir_module()).encode()
        for eqn in all_eqns(jaxpr)
        for value in eqn.params.values()
        if isinstance(value, Exported)
    ]
    return b"".join([_ADDRESS.sub("", str(jaxpr)).encode(), *modules])


def _constants(
    jaxpr: ClosedJaxpr, holders: tuple[Equation, ...], seen: set[int]
) -> Iterator[Constant]:
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    inside = plain(jaxpr)
    captured = zip(inside.constvars, getattr(jaxpr, "consts", ()), strict=False)
    for var, value in captured:
        if _is_array(value):
            yield Constant(value, _site(first_use(inside, var), holders))
    for eqn in inside.eqns:
        for atom in eqn.invars:
            if isinstance(atom, Literal) and _is_array(atom.val):
                yield Constant(atom.val, _site((eqn,), holders))
        for inner in closed_jaxprs(eqn.params):
            yield from _constants(inner, (eqn, *holders), seen)


def _site(eqns: tuple[Equation, ...], holders: tuple[Equation, ...]) -> Site | None:
    return Site((*eqns, *holders)) if eqns or holders else None


def first_use(jaxpr: ClosedJaxpr, var: Var) -> tuple[Equation, ...]:
    """The equation that uses `var` first, and those that hold it, innermost first."""
    for eqn in plain(jaxpr).eqns:
        places = [place for place, atom in enumerate(eqn.invars) if atom is var]
        if not places:
            continue
        for inner in closed_jaxprs(eqn.params):
            # The operands of a branch come after what chooses it.
            skipped = len(eqn.invars) - len(plain(inner).invars)
            if 0 <= skipped <= places[0]:
                own = plain(inner).invars[places[0] - skipped]
                if eqns := first_use(inner, own):
                    return (*eqns, eqn)
        return (eqn,)
    return ()


def _is_array(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _print_of(value: Leaf) -> str:
    """The bits of an array as a number; empty where each process has a part of it."""
    if isinstance(value, Tracer):  # an argument of the code that calls the step
        return ""
    if is_key(value.dtype):
        # While JAX traces, it would make an equation of this.
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = own_copy(value)
        if not value.is_fully_addressable:
            return ""
    host = np.ascontiguousarray(np.asarray(value)).reshape(-1)
    return f"{zlib.crc32(host.view(np.uint8)):08x}"
