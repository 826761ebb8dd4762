"""Parses a compiled HLO module: collectives, memory, operations."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from jaxstrategy._src import text
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import Line
from jaxstrategy._src.tracing.explanation.explanation import ExplainedCollective, Memory

DeviceGroups: TypeAlias = tuple[tuple[int, ...], ...]

_TABLES = ("FileNames", "FileLocations", "StackFrames")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9\-]*)\("
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|true_computation|false_computation)=%?([^\s,}]+)"
)
_CALLED_LIST = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_KINDS_OF_NUMBER = {"f": "float", "s": "int", "u": "uint", "c": "complex"}


class HloArray(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class HloInstruction(NamedTuple):
    """One instruction, with the loops around it."""

    name: str
    computation: str
    opcode: str
    operands: list[HloArray]
    results: list[HloArray]
    attributes: str
    loops: tuple[int | None, ...]
    in_branch: bool


@final
class HloModule:
    """A compiled program, parsed from `jax.stages.Compiled.as_text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._computations: dict[str, list[re.Match[str]]] = {}
        self._entry = ""
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        rows: dict[int, str] = {}
        body: list[re.Match[str]] = []
        for line in text.splitlines():
            if (found := _INSTRUCTION.match(line)) is not None:
                body.append(found)
            elif line.endswith("{") and not line.startswith((" ", "HloModule")):
                head = line.removeprefix("ENTRY ")
                name = head.split()[0].removeprefix("%")
                body = self._computations[name] = []
                if head != line:
                    self._entry = name
            elif line in _TABLES:
                rows = self._tables[line]
            elif line[:1].isdigit():
                number, _, row = line.partition(" ")
                rows[int(number)] = row
            elif line:
                rows = {}  # another table

    def instructions(
        self,
        computation: str | None = None,
        loops: tuple[int | None, ...] = (),
        in_branch: bool = False,
    ) -> Iterator[HloInstruction]:
        """All executed instructions, in order; those of a function for each call."""
        name = self._entry if computation is None else computation
        types: dict[str, list[HloArray]] = {}
        for found in self._computations.get(name, ()):
            arrays = itertools.starmap(_array, _ARRAY.findall(found["type"]))
            results = types[found["name"]] = list(arrays)
            names, attributes = _operands(found)
            operands = [array for x in names for array in types.get(x, ())]
            opcode = found["opcode"]
            yield HloInstruction(
                *(found["name"], name, opcode, operands, results),
                *(attributes, loops, in_branch),
            )
            around = loops
            if opcode == "while":
                turns = _TURNS.search(attributes)
                around = (None if turns is None else int(turns[1]), *loops)
            called = [name for _, name in _CALLED.findall(attributes)]
            for _, listed in _CALLED_LIST.findall(attributes):
                called += [name.strip().removeprefix("%") for name in listed.split(",")]
            for each in filter(None, called):
                is_choice = in_branch or opcode == "conditional"
                yield from self.instructions(each, around, is_choice)

    def collectives(
        self, replicas: Replicas, outermost: str
    ) -> Iterator[ExplainedCollective]:
        """The collectives between devices, in order."""
        mesh = replicas.mesh
        for each in self.instructions():
            operation = each.opcode.removesuffix("-start")
            if operation not in _KINDS:
                continue
            groups = _groups(each.attributes) or (tuple(range(mesh.devices.size)),)
            if max(map(len, groups)) == 1:
                continue
            # The axes of the mesh along which members of a group differ.
            indices = [np.unravel_index(group, mesh.devices.shape) for group in groups]
            differ = [any(map(np.ptp, along)) for along in zip(*indices, strict=True)]
            yield ExplainedCollective(
                operation=operation,
                kind=_KINDS[operation],
                nbytes=sum(array.nbytes for array in each.operands),
                dtypes=tuple(dict.fromkeys(array.dtype for array in each.operands)),
                loops=each.loops,
                in_branch=each.in_branch,
                groups=groups,
                axes=(axes := tuple(itertools.compress(mesh.axis_names, differ))),
                is_inner=not set(axes).isdisjoint(replicas.inner_axes),
                cause="compiler",
                line=next(self._lines(each, outermost), None),
            )

    def _lines(self, instruction: HloInstruction, outermost: str) -> Iterator[Line]:
        """The user's lines of an instruction, of its first reader, and so on."""
        body = {x["name"]: x for x in self._computations[instruction.computation]}
        first_readers: dict[str, str] = {}
        for reader, found in body.items():
            for name in _operands(found)[0]:
                first_readers.setdefault(name, reader)
        name: str | None = instruction.name
        while name is not None:
            if (frame := _FRAME.search(body[name].string)) is not None:
                frames = itertools.takewhile(
                    lambda frame: frame[0] != outermost, self._frames(int(frame[1]))
                )
                if (line := text.innermost(frames)) is not None:
                    yield line
            name = first_readers.get(name)

    def _frames(self, number: int) -> Iterator[tuple[str, int]]:
        """The files and lines of a stack frame and its parents."""
        frames = self._tables["StackFrames"]
        # Ids of parents have an offset (1, JAX 0.10 and 0.12), which is the parent of
        # the outermost frame.
        offset = _fields(frames.get(1, "")).get("parent_frame_id", 0)
        while number in frames:
            frame = _fields(frames[number])
            place = _fields(self._tables["FileLocations"][frame["file_location_id"]])
            file = self._tables["FileNames"][place["file_name_id"]]
            yield file.strip('"'), place["line"]
            number = frame["parent_frame_id"] - offset


def _fields(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}


def _operands(found: re.Match[str]) -> tuple[list[str], str]:
    """The names of an instruction's operands, and its attributes."""
    rest, depth, end = found.string[found.end() :], 1, 0
    while depth and end < len(rest):
        depth += (rest[end] == "(") - (rest[end] == ")")
        end += 1
    # There may be types and comments between the names.
    operands = re.sub(r"/\*.*?\*/", "", rest[: end - 1])
    return re.findall(r"%?([\w.\-]+)(?=\s*(?:,|$))", operands), rest[end:]


def _array(dtype: str, dimensions: str) -> HloArray:
    found = re.fullmatch(r"(b?[a-z])(\d+)(\w*)", dtype)
    name, bits = dtype, 0  # a token
    if dtype == "pred":
        name, bits = "bool", 8
    elif found is not None:
        kind, size, rest = found.groups()
        letter = _KINDS_OF_NUMBER.get(kind[-1], kind[-1])
        name = f"{kind[:-1]}{letter}{size}" + (f"_{rest}" if rest else "")
        bits = int(size)
    shape = _numbers(dimensions) if dimensions else ()
    return HloArray(name, shape, -(-math.prod(shape) * bits // 8))


# Their kinds for a `Topology`. Of an asynchronous one the start counts.
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    # No slower than an all-reduce.
    "collective-broadcast": "all_reduce",
}
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[^}]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def _groups(attributes: str) -> DeviceGroups | None:
    """The groups of devices of a collective; None: one of all."""
    if (found := _PAIRS.search(attributes) or _LISTED.search(attributes)) is not None:
        return tuple(map(_numbers, re.findall(r"\{([^}]*)\}", found[1]))) or None
    if (found := _COUNTED.search(attributes)) is not None:
        shape, counted, order = found.groups()
        sizes = _numbers(counted)
        places = np.arange(math.prod(sizes)).reshape(sizes)
        if order is not None:
            places = places.transpose(_numbers(order))
        rows = places.reshape(_numbers(shape))
    elif (found := _BY_AXES.search(attributes)) is not None:
        named = {x: int(size) for x, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        over = re.findall(r"'([^']*)'", found[2])
        places = np.arange(math.prod(named.values())).reshape(*named.values())
        last = [list(named).index(name) for name in over]
        places = np.moveaxis(places, last, range(-len(last), 0))
        rows = places.reshape(-1, math.prod(named[name] for name in over))
    else:
        return None
    return tuple(tuple(map(int, row)) for row in rows)


def _numbers(written: str) -> tuple[int, ...]:
    return tuple(map(int, written.split(",")))


# Of matrix products and convolutions, as instructions or calls of cuBLAS and cuDNN.
_CONTRACTED = re.compile(r"\blhs_contracting_dim(?:ension)?s\W+([\d,\"]*)[\]}]")
_KERNEL = re.compile(r"\bdim_labels=\w+_(\w+)->")
# XLA counts no call of a library; of these it is known what they do.
_ATTENTION = re.compile(
    r'"__cudnn\$fmha\w*?(?P<backward>Backward)?(?:F8)?".*'
    r'"intermediate_tensor_shape":\{.*?"dimensions":\[(?P<scores>[\d",]*)\]'
)
_LIBRARY_CALL = re.compile(
    rf'custom_call_target=("__(?:cublas|cudnn\$conv)|{_ATTENTION.pattern})'
)
_WINDOW = re.compile(r'"sliding_window_length":"?(\d+)')
# Other calls have unknown work, but for those that move or sort data, draw random bits,
# or call the host.
_UNCOUNTED = re.compile(
    r'custom_call_target="(?!Sharding|SPMD|AllocateBuffer|MoveTo|annotate_|TopK|__cub\$'
    r'|__gpu\$TopK|ConcatBitcast|cu_threefry|\w*callback)([^"]*)"'
)


class Figures(NamedTuple):
    """XLA's figures of a program on one device.

    `flops` count the body of a loop once; `operations`, and the bytes that are read and
    written, `moved`, as often as its known iterations.
    """

    memory: Memory | None
    flops: float | None
    has_loops: bool
    uncounted_calls: tuple[str, ...]
    operations: float
    moved: float
    module: HloModule

    def of_explanation(self) -> dict[str, Any]:
        """Those that an `Explanation` has."""
        names = ("memory", "flops", "has_loops", "uncounted_calls")
        return {name: getattr(self, name) for name in names}


def figures(executable: Any) -> Figures:
    """XLA's figures of a compiled program, with library calls by its text."""
    module = HloModule(executable.as_text() or "")
    stats, costs = executable.memory_analysis(), executable.cost_analysis() or {}
    memory = stats and Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
    once, repeated, calls, repeated_calls = np.zeros((4, 2))
    uncounted, has_loops = dict[str, None](), False
    for each in module.instructions():
        has_loops |= each.opcode == "while"
        if each.opcode in ("parameter", "tuple", "get-tuple-element", "while", "call"):
            continue
        is_call = _LIBRARY_CALL.search(each.attributes) is not None
        # The last of several results of a library call is its workspace.
        last = max(len(each.results) - 1, 1) if is_call else None
        nbytes = sum(array.nbytes for array in (*each.operands, *each.results[:last]))
        amounts = np.array([_operations(each), nbytes], float)
        times = math.prod(1 if n is None else n for n in each.loops)
        if is_call:
            calls += amounts
            repeated_calls += amounts * times
        else:
            once += amounts
            repeated += amounts * times
            if (found := _UNCOUNTED.search(each.attributes)) is not None:
                uncounted[found[1]] = None
    scale = np.divide(repeated, once, out=np.ones(2), where=once > 0)
    # -1 for a library call.
    counted = np.maximum([costs.get(x, 0.0) for x in ("flops", "bytes accessed")], 0.0)
    operations, moved = (counted * scale + repeated_calls).tolist()
    flops = float(counted[0] + calls[0]) if "flops" in costs else None
    return Figures(
        *(memory, flops, has_loops, tuple(uncounted)), *(operations, moved, module)
    )


def _operations(instruction: HloInstruction) -> float:
    """Operations of products and convolutions; of others one for each element."""
    attributes, operands = instruction.attributes, instruction.operands
    elements = sum(math.prod(array.shape) for array in instruction.results)
    if len(operands) < 2 or not instruction.results:  # as of a callback
        return elements
    result = instruction.results[0]
    if (found := _ATTENTION.search(attributes)) is not None:
        # Operands begin with query, key and value, `[..., head size]`; the scores, of
        # shape `[batch, heads, queries, keys]`, are not stored. Two products forward;
        # backward those of the scores again, and of four gradients. Half of each is
        # skipped by a causal mask (FlashAttention-2, arXiv 2307.08691, section 4.1).
        *others, keys = map(int, re.findall(r"\d+", found["scores"]))
        reached = keys / 2 if 'CAUSAL"' in attributes else keys
        if (window := _WINDOW.search(attributes)) is not None and int(window[1]):
            reached = min(reached, int(window[1]))
        query, value = operands[0].shape[-1], operands[2].shape[-1]
        sizes = 3 * query + 2 * value if found["backward"] else query + value
        return 2.0 * math.prod(others) * reached * sizes
    if (found := _CONTRACTED.search(attributes)) is not None:
        indices, shape = map(int, re.findall(r"\d+", found[1])), operands[0].shape
        # Of a fusion, the product that is told of may be another's.
        contracted = [shape[i] for i in indices if i < len(shape)]
        return 2.0 * math.prod(result.shape) * math.prod(contracted)
    if (found := _KERNEL.search(attributes)) is not None:
        # Each element of the output is a sum over the kernel's elements of one feature.
        # Gradients have output and kernel elsewhere.
        output, kernel = result, operands[1]
        if "convBackwardFilter" in attributes:
            output, kernel = operands[1], result
        elif "convBackwardInput" in attributes:
            output = operands[0]
        features = kernel.shape[found[1].index("o")]
        return 2.0 * math.prod(output.shape) * math.prod(kernel.shape) / features
    return elements
