"""How the state of a step lies, as sections of its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxstrategy.charts._bars import BarPart, ChartBar
from jaxstrategy.text._array_types import array_type
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._lists import and_more
from jaxstrategy.text._units import with_bytes, with_noun
from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing.explanation._facts import Memory
from jaxstrategy.tracing.explanation._report_sections import (
    MOST_VALUES,
    Row,
    Section,
    short,
)
from jaxstrategy.tracing.explanation._sharding_facts import (
    ExplainedLeaf,
    ExplainedSharding,
)


def sections(found: ExplainedSharding, memory: Memory | None) -> Iterator[Section]:
    """What is divided, what is not and why, what that costs and saves."""
    yield _summary(found, memory)
    if found.divided:
        yield from _leaves("Divided arguments and variables", found.divided)
    if found.whole:
        yield from _leaves("Whole arguments and variables", found.whole)
    if found.whole_sums:
        header = ("type", "bytes", "why", "where", "because of")
        rows = [
            (
                array_type(each.dtype, each.shape),
                with_bytes(each.nbytes),
                each.reason,
                short(each.line),
                _short_or_nothing(each.reader),
            )
            for each in found.whole_sums
        ]
        yield Section("Large sums that every replica gets all of", header, rows)
    if found.undecided:
        heading = "Operations on divided arrays that may exchange more: XLA chooses"
        rows = [
            (str(each.count), each.operation, short(each.line))
            for each in found.undecided
        ]
        yield Section(heading, ("times", "operation", "where"), rows)


def _summary(found: ExplainedSharding, memory: Memory | None) -> Section:
    rows = [
        ("state on a device", with_bytes(found.state_bytes)),
        ("  if nothing were divided", with_bytes(found.replicated_bytes)),
        ("results on a device", with_bytes(_on_a_device(found.results))),
    ]
    over = with_noun(found.num_replicas, "replica")
    heading = f"State, whole on each of {over}"
    if found.shard is not None or found.divided:
        chosen = "variables" if found.shard is None else repr(found.shard)
        heading = f"Sharded state: {chosen} over {over}"
        rows += [
            ("gathered in a step", with_bytes(found.gathered_bytes)),
            ("scattered in a step", with_bytes(found.scattered_bytes)),
        ]
    if memory is not None:
        rows.append(("memory of a device, at most", with_bytes(memory.peak)))
    return Section(heading, ("what", "amount"), rows, bars=_state_bars(found))


def _state_bars(found: ExplainedSharding) -> Sequence[ChartBar]:
    """The state on a device beside what it would be if nothing were divided."""
    if not found.divided:
        return ()
    sizes = [
        (_on_a_device(found.whole), "whole arrays", Colour.WHOLE),
        (_on_a_device(found.divided), "parts of arrays", Colour.PART),
    ]
    parts = tuple(BarPart(n, text, colour, with_bytes(n)) for n, text, colour in sizes)
    whole = BarPart(found.replicated_bytes, sizes[0][1], Colour.WHOLE)
    return [
        ChartBar("state on a device", parts, with_bytes(found.state_bytes)),
        ChartBar(
            "if nothing were divided", (whole,), with_bytes(found.replicated_bytes)
        ),
    ]


def _leaves(title: str, leaves: Sequence[ExplainedLeaf]) -> Iterator[Section]:
    total = with_bytes(_on_a_device(leaves))
    heading = f"{title}: {with_noun(len(leaves), 'array')}, {total} on a device"
    largest_first = sorted(leaves, key=lambda leaf: -leaf.nbytes)
    header = ("array", "type", "on a device", "division")
    yield Section(heading, header, list(_rows(largest_first)))


def _on_a_device(leaves: Sequence[ExplainedLeaf]) -> int:
    return sum(leaf.device_bytes for leaf in leaves)


def _rows(leaves: Sequence[ExplainedLeaf]) -> Iterator[Row]:
    for leaf in leaves[:MOST_VALUES]:
        kind = array_type(leaf.dtype, leaf.shape)
        how = "; ".join(_how(leaf))
        yield leaf.path, kind, with_bytes(leaf.device_bytes), how
    if more := and_more(len(leaves), MOST_VALUES, before=""):
        yield more, "", "", ""


def _how(leaf: ExplainedLeaf) -> Iterator[str]:
    yield leaf.reason or f"dimension {leaf.dimension}"
    for dimension, names in enumerate(leaf.inner):
        if names:
            axes = names if isinstance(names, str) else ", ".join(names)
            yield f"dimension {dimension} over {axes} in each replica"


def _short_or_nothing(line: Line | None) -> str:
    return "" if line is None else short(line)
