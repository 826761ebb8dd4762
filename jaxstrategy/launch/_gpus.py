"""The share of GPUs that a worker may use."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that the variable names; none where it is unset or empty."""
    return [name for name in environment.get(VARIABLE, "").split(",") if name.strip()]


def share(
    per_process: int, local_rank: int, environment: Mapping[str, str]
) -> list[str]:
    """The GPUs of one worker, out of those that the launcher may use.

    >>> share(2, 1, {})
    ['2', '3']
    >>> share(2, 1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    ['6', '7']
    """
    first = per_process * local_rank
    wanted = range(first, first + per_process)
    names = visible(environment)
    return [names[i] for i in wanted] if names else [str(i) for i in wanted]
