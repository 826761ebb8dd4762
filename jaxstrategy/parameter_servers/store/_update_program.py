"""A program that changes variables together: `UpdateProgram`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import jax
import numpy as np
from jax import export

from jaxstrategy.parameter_servers.store import _state_programs
from jaxstrategy.parameter_servers.store._state_programs import (
    Program,
    Type,
    array_types,
)
from jaxstrategy.text._array_types import array_type


@final
class UpdateProgram:
    """An exported program, of what variables hold and of operands.

    Its results are what they hold afterwards, of the same types.
    """

    def __init__(self, key: str, exported: bytes) -> None:
        """Deserialize it.

        Raises:
          ValueError: no exported program, or none for CPUs.
        """
        self._key = key
        self._exported = _deserialized(key, exported)
        self._programs: dict[tuple[tuple[Type, ...], int, bool], Program] = {}

    def check(self, state: Sequence[Type], operands: Sequence[Type]) -> None:
        """See that it takes these, and gives back the types of the state.

        Raises:
          ValueError: it does not.
        """
        given = tuple(state) + tuple(operands)
        if (given, len(state), True) not in self._programs:
            self._compile(given, len(state), True)

    def run(
        self, state: Sequence[jax.Array], operands: Sequence[np.ndarray], donates: bool
    ) -> list[jax.Array]:
        """The new state.

        Args:
          state: what the variables hold.
          operands: besides.
          donates: whether the state's memory may be used for the results.
        """
        given = tuple((a.shape, a.dtype) for a in state) + array_types(operands)
        key = given, len(state), donates
        if key not in self._programs:
            self._compile(*key)
        return self._programs[key](state, operands)

    def _compile(self, given: tuple[Type, ...], count: int, donates: bool) -> None:
        self._check_types(given, count)
        program = _state_programs.compiled(
            lambda *arrays: jax.tree.leaves(self._exported.call(*arrays)),
            given[:count],
            given[count:],
            donates,
        )
        self._programs[given, count, donates] = program

    def _check_types(self, given: tuple[Type, ...], count: int) -> None:
        wanted = [(a.shape, a.dtype) for a in self._exported.in_avals]
        if not _fits(given, wanted):
            raise ValueError(
                f"Update {self._key!r} takes {_shown(wanted)}. It was given variables "
                f"{_shown(given[:count])} and operands {_shown(given[count:])}."
            )
        results = [(a.shape, a.dtype) for a in self._exported.out_avals]
        if not _fits(given[:count], results):
            raise ValueError(
                f"Update {self._key!r} returns {_shown(results)}, which cannot become "
                f"what the variables hold: {_shown(given[:count])}."
            )


def _deserialized(key: str, exported: bytes) -> export.Exported:
    try:
        program = export.deserialize(bytearray(exported))
    except Exception as error:
        raise ValueError(
            f"Update {key!r} is no program in the form of `jax.export`: {error}"
        ) from error
    if "cpu" not in program.platforms:
        raise ValueError(
            f"Update {key!r} was exported for {', '.join(program.platforms)}. "
            "Parameter servers run on CPUs: export it with `platforms=['cpu']`."
        )
    return program


def _fits(given: Sequence[Type], wanted: Sequence[Type]) -> bool:
    return list(given) == [(tuple(shape), np.dtype(dtype)) for shape, dtype in wanted]


def _shown(types: Sequence[Type]) -> str:
    return f"({', '.join(array_type(dtype, shape) for shape, dtype in types)})"
