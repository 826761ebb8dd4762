"""The collectives of a compiled program: `compiled_collectives`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from jaxstrategy.replicas._device_groups import (
    DeviceGroups,
    all_in_one,
    differing_axes,
)
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text import _user_code
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing.explanation._facts import CompiledCollective
from jaxstrategy.tracing.explanation._hlo import HloInstruction, HloModule

# What they are to a `Topology`. Of one that comes apart into a start and an end, the
# start counts.
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    # Nothing takes longer than an all-reduce of as much.
    "collective-broadcast": "all_reduce",
}
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[^}]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def compiled_collectives(
    text: str, replicas: Replicas, outermost: str
) -> Iterator[CompiledCollective]:
    """What the devices of replicas exchange, in order.

    Args:
      text: of the compiled program.
      replicas: that it is for.
      outermost: the file from which the step was traced; what called that is not part
        of the step.
    """
    module = HloModule(text)
    for each in module.instructions():
        operation = each.opcode.removesuffix("-start")
        if operation not in _KINDS:
            continue
        groups = _groups(each.attributes) or all_in_one(replicas.mesh)
        if max(map(len, groups)) > 1:
            yield CompiledCollective(
                operation=operation,
                kind=_KINDS[operation],
                nbytes=sum(array.nbytes for array in each.operands),
                dtypes=tuple(dict.fromkeys(array.dtype for array in each.operands)),
                loops=each.loops,
                in_branch=each.in_branch,
                groups=groups,
                axes=differing_axes(replicas.mesh, groups),
                inner_axes=replicas.inner_axes,
                line=_line(module, each, outermost),
            )


def _line(module: HloModule, found: HloInstruction, outermost: str) -> Line | None:
    """The user's line that an instruction comes from, or else who reads it."""
    for origin in module.origins(found):
        frames = itertools.takewhile(
            lambda frame: frame[0] != outermost, module.frames(origin)
        )
        if (line := _user_code.innermost(frames)) is not None:
            return line
    return None


def _groups(attributes: str) -> DeviceGroups | None:
    """The devices that exchange with each other; None: all of them."""
    if (found := _PAIRS.search(attributes) or _LISTED.search(attributes)) is not None:
        return tuple(map(_numbers, re.findall(r"\{([^}]*)\}", found[1]))) or None
    if (found := _COUNTED.search(attributes)) is not None:
        shape, counted, order = found.groups()
        places = _places(_numbers(counted))
        if order is not None:
            places = places.transpose(_numbers(order))
        return _rows(places.reshape(_numbers(shape)))
    if (found := _BY_AXES.search(attributes)) is not None:
        sizes = {x: int(size) for x, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        over = re.findall(r"'([^']*)'", found[2])
        last = [list(sizes).index(name) for name in over]
        places = np.moveaxis(
            _places([*sizes.values()]), last, list(range(-len(last), 0))
        )
        return _rows(places.reshape(-1, math.prod(sizes[name] for name in over)))
    return None


def _places(shape: Sequence[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _rows(places: np.ndarray) -> DeviceGroups:
    return tuple(tuple(map(int, row)) for row in places)


def _numbers(written: str) -> tuple[int, ...]:
    return tuple(map(int, written.split(",")))
