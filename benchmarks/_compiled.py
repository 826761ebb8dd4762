"""What XLA made of a jitted function: its collectives and its memory.

It is asked of the executable that calls really use, whoever compiled it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# Times the bytes of its result, those that one of g devices sends in a ring.
SENT: Mapping[str, Any] = {
    "all-gather": lambda g: (g - 1) / g,
    "reduce-scatter": lambda g: g - 1,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
}
BITS = re.compile(r"(pred)|[a-z]+?(\d+)")
ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
HEAD = re.compile(r"(ENTRY )?%?(\S+) \(.*\{")
LINE = re.compile(r"(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z][a-z-]*)\((.*)")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%(\S+?)[,\s)]"
    r"|branch_computations=\{([^}]*)\}"
)
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program; a loop of unknown length counts once."""

    kind: str
    nbytes: int  # of its result, on one device
    group: int  # how many devices take part together
    times: int  # how often a call does it
    line: str  # of XLA's text

    @property
    def whole(self) -> int:
        """Bytes of the whole array that is reduced, scattered or gathered."""
        return self.nbytes * (self.group if self.kind == "reduce-scatter" else 1)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a call, if devices stand in a ring."""
        return self.times * self.nbytes * SENT[self.kind](self.group)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program of one device: XLA's text, and bytes."""

    text: str
    arguments: int
    results: int  # donated memory included
    donated: int  # results in memory of arguments
    temporary: int

    @property
    def peak(self) -> int:
        """All bytes of a device."""
        return self.arguments + self.results - self.donated + self.temporary

    @property
    def collectives(self) -> list[Collective]:
        """Those between several devices, in the order of the text."""
        return [each for each in collectives(self.text) if each.group > 1]

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a call."""
        return sum(each.sent for each in self.collectives)

    def whole_by_kind(self) -> dict[str, int]:
        """Bytes of what is gathered, scattered and so on in a call, whole arrays."""
        totals = collections.Counter[str]()
        for each in self.collectives:
            totals[each.kind] += each.times * each.whole
        return dict(totals)


def compiled(name: str) -> Compiled:
    """The only living program of a function of this name.

    Raises:
      LookupError: there are none, or several.
    """
    modules = {
        module.name: (module, executable)
        for executable in jax.devices()[0].client.live_executables()
        for module in executable.hlo_modules()
        if re.search(rf"(?:^|_|\W){name}\W*$", module.name)
    }
    if len(modules) != 1:
        raise LookupError(f"{len(modules)} programs of {name}, not one: {[*modules]}")
    ((module, executable),) = modules.values()
    stats = executable.get_compiled_memory_stats()
    return Compiled(
        text=module.to_string(),
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
    )


def collectives(text: str) -> Iterator[Collective]:
    """All collectives of a program as XLA prints it."""
    devices = re.search(r"num_partitions=(\d+)", text)
    computations, entry = _computations(text)
    times = _times(computations, entry)
    for name, lines in computations.items():
        for line in lines:
            found = LINE.match(line)
            if found is None or not times[name]:
                continue
            kind = found[2].removesuffix("-start")
            if kind in SENT:
                is_pair = found[2] != kind and kind != "all-reduce"
                group = _group(line, int(devices[1]) if devices else 1)
                nbytes = _nbytes(found[1], is_pair)
                yield Collective(kind, nbytes, group, times[name], line)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each, and the name of the one that is called first."""
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = HEAD.match(line)
        if head is not None and not line.startswith(" "):
            lines = found[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line.strip())
    return found, entry


def _times(
    computations: Mapping[str, list[str]], entry: str
) -> collections.Counter[str]:
    """How often each is called."""
    times = collections.Counter[str]()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in computations[name]:
            turns = TURNS.search(line)
            for one, several in CALLED.findall(line):
                for called in [one] if one else re.findall(r"%([^\s,]+)", several):
                    visit(called, count * (int(turns[1]) if turns else 1))

    visit(entry, 1)
    return times


def _nbytes(type_text: str, is_pair: bool) -> int:
    """Of the arrays of a type; of a pair of operand and result, the latter."""
    arrays, bits = ARRAY.findall(type_text), 0
    for dtype, shape in arrays[len(arrays) // 2 if is_pair else 0 :]:
        found = BITS.match(dtype)
        assert found is not None, dtype
        size = math.prod(map(int, filter(None, shape.split(","))))
        bits += size * (8 if found[1] else int(found[2]))
    return bits // 8


def _group(line: str, devices: int) -> int:
    """The size of the groups, in each way that XLA writes them."""
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if mesh is not None:
        sizes = dict(re.findall(r"('\w+')=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'\w+'", mesh[2]))
    tiles = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if tiles is not None:
        return int(tiles[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(listed[1].split(",")) if listed is not None else devices
