"""A program that changes variables together: `UpdateProgram`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import jax
import numpy as np
from jax import export

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.parameter_servers.store import _cpu_programs
from jaxstrategy.parameter_servers.store._cpu_programs import Program
from jaxstrategy.parameter_servers.store._stored_types import Type, shown, types_of
from jaxstrategy.text._array_types import Shaped


@final
class UpdateProgram:
    """An exported program, of what variables hold and of operands.

    Its results are what they hold afterwards, of the same types.
    """

    def __init__(self, key: str, exported: bytes) -> None:
        """Deserialize it.

        Raises:
          ValueError: no exported program, or none for one CPU.
          MissingExtraError: what reads it is not installed.
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
        given = tuple((a.shape, a.dtype) for a in state) + types_of(operands)
        key = given, len(state), donates
        if key not in self._programs:
            self._compile(*key)
        return self._programs[key](state, operands)

    def _compile(self, given: tuple[Type, ...], count: int, donates: bool) -> None:
        self._check_types(given, count)
        program = _cpu_programs.compiled(
            lambda *arrays: jax.tree.leaves(self._exported.call(*arrays)),
            given[:count],
            given[count:],
            donates,
        )
        self._programs[given, count, donates] = program

    def _check_types(self, given: tuple[Type, ...], count: int) -> None:
        wanted = _types(self._exported.in_avals)
        if given != wanted:
            raise ValueError(
                f"Update {self._key!r} takes ({shown(*wanted)}), not variables "
                f"({shown(*given[:count])}) and operands ({shown(*given[count:])})."
            )
        results = _types(self._exported.out_avals)
        if given[:count] != results:
            raise ValueError(
                f"Update {self._key!r} returns ({shown(*results)}), which cannot "
                f"become what the variables hold: ({shown(*given[:count])})."
            )


def _deserialized(key: str, exported: bytes) -> export.Exported:
    try:
        program = export.deserialize(bytearray(exported))
    except ImportError as missing:
        raise MissingExtraError(
            "Updates of variables on parameter servers need flatbuffers, which is not "
            "installed. Install the extra: pip install 'jaxstrategy[coordinator]'"
        ) from missing
    except Exception as error:
        raise ValueError(
            f"Update {key!r} is no program in the form of `jax.export`: {error}"
        ) from error
    if "cpu" not in program.platforms:
        raise ValueError(
            f"Update {key!r} was exported for {', '.join(program.platforms)}. "
            "Parameter servers run on CPUs: export it with `platforms=['cpu']`."
        )
    if program.nr_devices != 1:
        raise ValueError(
            f"Update {key!r} was exported for {program.nr_devices} devices; a "
            "parameter server computes it on one."
        )
    return program


def _types(abstract: Sequence[Shaped]) -> tuple[Type, ...]:
    return tuple((array.shape, array.dtype) for array in abstract)
