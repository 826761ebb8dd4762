"""The variables of the environment that decide how JAX runs and how processes meet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(set; not shown)"
_WANTED = re.compile(
    r"(CUDA|HIP|JAX|JAXSTRATEGY|KERAS|LIBTPU|NCCL|OMPI|PMI|RAY|ROCR|SLURM|SM|TPU|XLA)_\w+"
    r"|TF_CONFIG|POD_NAME|OMP_NUM_THREADS|KUBERNETES_SERVICE_HOST"
)
# Many, and about what does not concern us; or about the person who runs the job.
_UNWANTED = re.compile(r"SLURM_(?!JOB_NUM_NODES|N|PROCID|LOCALID|STEP_N)\w+|SM_HP\w*")
_SECRET = re.compile(r"SECRET|TOKEN|KEY|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by name, as they may be shown to strangers."""
    names = sorted(name for name in environment if _is_wanted(name))
    return {name: _shown(name, environment[name]) for name in names}


def problems(environment: Mapping[str, str]) -> list[str]:
    """What is wrong with them, in sentences."""
    if "TF_CONFIG" not in environment or _cluster(environment["TF_CONFIG"]):
        return []
    return [
        "TF_CONFIG is not JSON with a `cluster` and a `task`; processes cannot meet."
    ]


def _is_wanted(name: str) -> bool:
    return bool(_WANTED.fullmatch(name)) and not _UNWANTED.fullmatch(name)


def _shown(name: str, value: str) -> str:
    if _SECRET.search(name):
        return HIDDEN
    if name == "TF_CONFIG":
        return _cluster(value) or "(malformed)"
    return _PASSWORD.sub("***", value)


def _cluster(text: str) -> str | None:
    """What `TF_CONFIG` says but for addresses; None if it cannot be understood."""
    try:
        config: Any = json.loads(text)
        tasks = {
            str(job): len(addresses) for job, addresses in config["cluster"].items()
        }
        task = config["task"]
        numbers = ", ".join(f"{job}: {count}" for job, count in tasks.items())
        return f"task {task['type']} {task['index']} of {numbers}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
