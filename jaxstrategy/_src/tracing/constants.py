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
from jaxstrategy._src.replicas.inner_axes import local_copy
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
class ProgramValue:
    """An array that a step has captured, or an argument, the same in all processes.

    Attributes:
      value: it.
      label: of an argument, as messages call it; empty for a constant of the program.
      site: where the program uses it first.
    """

    value: Leaf
    label: str = ""
    site: Site | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the step has captured it."""
        return not self.label or self.label.startswith("`captured ")

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
        """Equal in all processes that have the same."""
        is_told = not self.label or self.is_unshared
        return f"{self._type} {_bits_of(self._array) if is_told else ''}"

    @property
    def description(self) -> str:
        """For messages."""
        told = self._type
        if self.label:
            told += f", {'' if self.is_captured else 'argument '}{self.label}"
        line = self.site and self.site.line
        return told + (f", used at {line}" if line else "")

    @property
    def _array(self) -> jax.Array | np.ndarray:
        is_array = isinstance(self.value, (jax.Array, np.ndarray))
        return self.value if is_array else np.asarray(self.value)

    @property
    def _type(self) -> str:
        return array_type(self._array.dtype, self._array.shape, ", ")


def constants(jaxpr: ClosedJaxpr) -> Iterator[ProgramValue]:
    """The constants of `jaxpr`, and of functions, branches and loops in it."""
    yield from _constants(jaxpr, (), set())


def fingerprint(
    name: str,
    jaxpr: ClosedJaxpr,
    given: Mapping[int, ProgramValue] | None = None,
    code: bytes | None = None,
) -> ProgramPrint:
    """A print of a program, equal in all processes that have made the same, as JSON.

    Args:
      name: the program's.
      jaxpr: what it computes.
      given: what it is called with, by the places of the inputs.
      code: what stands for its code; by default the whole.
    """
    found = list(constants(jaxpr))
    for index, each in (given or {}).items():
        site = _site(_first_use(jaxpr, plain(jaxpr).invars[index]), ())
        found.append(dataclasses.replace(each, site=site))
    bits = zlib.crc32(code or code_of(plain(jaxpr)))
    return {
        "name": name,
        "prints": [f"{bits:08x}", *(each.print for each in found)],
        "captured": [each.description for each in found],
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
) -> Iterator[ProgramValue]:
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    inside = plain(jaxpr)
    captured = zip(inside.constvars, getattr(jaxpr, "consts", ()), strict=False)
    for var, value in captured:
        if _is_array(value):
            site = _site(_first_use(inside, var), holders)
            yield ProgramValue(value, site=site)
    for eqn in inside.eqns:
        for atom in eqn.invars:
            if isinstance(atom, Literal) and _is_array(atom.val):
                yield ProgramValue(atom.val, site=_site((eqn,), holders))
        for inner in closed_jaxprs(eqn.params):
            yield from _constants(inner, (eqn, *holders), seen)


def _site(eqns: tuple[Equation, ...], holders: tuple[Equation, ...]) -> Site | None:
    return Site((*eqns, *holders)) if eqns or holders else None


def _first_use(jaxpr: ClosedJaxpr, var: Var) -> tuple[Equation, ...]:
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
                if eqns := _first_use(inner, own):
                    return (*eqns, eqn)
        return (eqn,)
    return ()


def _is_array(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _bits_of(value: Leaf) -> str:
    """The bits of an array as a number; empty where each process has a part of it."""
    if isinstance(value, Tracer):  # an argument of the code that calls the step
        return ""
    if is_key(value.dtype):
        # While JAX traces, it would make an equation of this.
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = local_copy(value)
        if not value.is_fully_addressable:
            return ""
    host = np.ascontiguousarray(np.asarray(value)).reshape(-1)
    return f"{zlib.crc32(host.view(np.uint8)):08x}"
