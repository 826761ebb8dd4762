"""The constants of a program, and fingerprints to compare it with other processes'.

A step may capture another array in each process, such as one read from a file or drawn
at random; JAX does not notice.
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
from jaxstrategy._src.text import array_type
from jaxstrategy._src.tracing.jaxprs import (
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

# Addresses of objects.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Locations in a module: files and lines of the code that exported it.
_LOCATION = re.compile(r' loc\((?:#loc\d*|unknown|"(?:[^"\\]|\\.)*")\)|^#loc.*\n', re.M)


@dataclasses.dataclass(frozen=True)
class ProgramValue:
    """A constant or argument that must be the same in all processes.

    Attributes:
      value: the array or number.
      label: the argument in messages; empty for a constant.
      site: where the program uses it first.
    """

    value: Leaf
    label: str = ""
    site: Site | None = None

    @property
    def is_captured(self) -> bool:
        return not self.label or self.label.startswith("`captured ")

    @property
    def is_unshared(self) -> bool:
        """Whether each process has its own, which may differ."""
        if isinstance(self.value, Tracer):
            return False
        if not isinstance(self.value, jax.Array):
            return True
        return not self.value.is_deleted() and self.value.is_fully_addressable

    @property
    def fingerprint(self) -> str:
        """Equal in all processes that have the same."""
        has_bits = not self.label or self.is_unshared
        return f"{self._type} {_checksum(self._array) if has_bits else ''}"

    @property
    def description(self) -> str:
        text = self._type
        if self.label:
            text += f", {'' if self.is_captured else 'argument '}{self.label}"
        line = self.site and self.site.line
        return text + (f", used at {line}" if line else "")

    @property
    def _array(self) -> jax.Array | np.ndarray:
        is_array = isinstance(self.value, (jax.Array, np.ndarray))
        return self.value if is_array else np.asarray(self.value)

    @property
    def _type(self) -> str:
        return array_type(self._array.dtype, self._array.shape, ", ")


def constants(
    jaxpr: ClosedJaxpr,
    holders: tuple[Equation, ...] = (),
    seen: set[int] | None = None,
) -> Iterator[ProgramValue]:
    """The constants of `jaxpr` and of inner jaxprs, which are in `holders`."""
    seen = set() if seen is None else seen
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    inside = plain(jaxpr)
    consts = getattr(jaxpr, "consts", ())
    for var, value in zip(inside.constvars, consts, strict=False):
        if _is_array(value):
            yield ProgramValue(value, site=_site(_first_use(inside, var), holders))
    for eqn in inside.eqns:
        for atom in eqn.invars:
            if isinstance(atom, Literal) and _is_array(atom.val):
                yield ProgramValue(atom.val, site=_site((eqn,), holders))
        for inner in closed_jaxprs(eqn.params):
            yield from constants(inner, (eqn, *holders), seen)


def fingerprint(
    name: str,
    jaxpr: ClosedJaxpr,
    arguments: Mapping[int, ProgramValue] | None = None,
    code: bytes | None = None,
) -> ProgramPrint:
    """A JSON object that is equal in all processes that have the same program.

    Args:
      arguments: by the indices of inputs.
      code: identifies the code; `code_of(jaxpr)` by default.
    """
    values = list(constants(jaxpr))
    for index, argument in (arguments or {}).items():
        site = _site(_first_use(jaxpr, plain(jaxpr).invars[index]), ())
        values.append(dataclasses.replace(argument, site=site))
    checksum = zlib.crc32(code or code_of(plain(jaxpr)))
    return {
        "name": name,
        "prints": [f"{checksum:08x}", *(each.fingerprint for each in values)],
        "captured": [each.description for each in values],
    }


def code_of(jaxpr: Jaxpr) -> bytes:
    """Equal for jaxprs that compute the same from their inputs."""
    modules = [
        _LOCATION.sub("", value.mlir_module()).encode()
        for eqn in all_eqns(jaxpr)
        for value in eqn.params.values()
        if isinstance(value, Exported)
    ]
    return b"".join([_ADDRESS.sub("", str(jaxpr)).encode(), *modules])


def _site(eqns: tuple[Equation, ...], holders: tuple[Equation, ...]) -> Site | None:
    return Site((*eqns, *holders)) if eqns or holders else None


def _first_use(jaxpr: ClosedJaxpr, var: Var) -> tuple[Equation, ...]:
    """The equation that uses `var` first, and those around it, innermost first."""
    for eqn in plain(jaxpr).eqns:
        index = next((i for i, atom in enumerate(eqn.invars) if atom is var), None)
        if index is None:
            continue
        for inner in closed_jaxprs(eqn.params):
            # The operands of a branch come after its index.
            skipped = len(eqn.invars) - len(plain(inner).invars)
            if 0 <= skipped <= index:
                if eqns := _first_use(inner, plain(inner).invars[index - skipped]):
                    return (*eqns, eqn)
        return (eqn,)
    return ()


def _is_array(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _checksum(value: Leaf) -> str:
    """A checksum of the bits of an array; empty if no process has all of it."""
    if isinstance(value, Tracer):
        return ""
    if is_key(value.dtype):
        # Or it would be an equation, where JAX traces.
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = local_copy(value)
        if not value.is_fully_addressable:
            return ""
    host = np.ascontiguousarray(np.asarray(value)).reshape(-1)
    return f"{zlib.crc32(host.view(np.uint8)):08x}"
