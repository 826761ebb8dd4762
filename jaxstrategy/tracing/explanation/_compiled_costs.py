"""What XLA says of a compiled program: its memory and operations."""

from __future__ import annotations

import re
from typing import Any

from jaxstrategy.tracing.explanation._facts import Memory

_LOOP = re.compile(r"\bwhile\(")


def memory(executable: Any) -> Memory | None:
    """The memory of one device; None without a program, or if XLA does not say."""
    stats = None if executable is None else executable.memory_analysis()
    if stats is None:
        return None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def flops(executable: Any) -> float | None:
    """The floating-point operations of one device; None likewise.

    The program is that of one device, after XLA has divided the work. XLA cannot say
    how often a loop turns, and counts its body once.
    """
    costs = None if executable is None else executable.cost_analysis()
    return costs.get("flops") if costs else None


def has_loops(executable: Any) -> bool:
    """Whether there are loops in the program, whose bodies `flops` counts once."""
    return _LOOP.search(executable.as_text() or "") is not None
