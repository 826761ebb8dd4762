"""What `python -m jaxstrategy.doctor` finds, and how it says it: `main`.

Devices are asked in a process of its own, with a deadline: an accelerator that somebody
else holds, or a driver that does not fit, may never answer or may end the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxstrategy._src.launch import options as _options
from jaxstrategy._src.replicas.devices import simulate
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.strategies.mirrored import MirroredStrategy
from jaxstrategy._src.text import with_noun
from jaxstrategy._src.version import __version__

_SECONDS = 120.0
_STARTING = 60.0  # seconds; a busy host needs long to import JAX
_WANTED = re.compile(
    r"(CUDA|HIP|JAX|JAXSTRATEGY|KERAS|LIBTPU|NCCL|OMPI|PMI|RAY|ROCR|SLURM|SM|TPU|XLA)_\w+"
    r"|TF_CONFIG|POD_NAME|OMP_NUM_THREADS|KUBERNETES_SERVICE_HOST"
)
# Many, and about what does not concern us; or about the person who runs the job.
_UNWANTED = re.compile(r"SLURM_(?!JOB_NUM_NODES|N|PROCID|LOCALID|STEP_N)\w+|SM_HP\w*")
_SECRET = re.compile(r"SECRET|TOKEN|KEY|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.doctor",
        description="Prints what a bug report needs: versions, devices and variables "
        "of the environment (secrets left out); and has the devices add up an array. "
        "Ends with 0 if all is well, else with 1.",
    )
    text = "ask N simulated CPU devices"
    parser.add_argument("--simulate", type=_options.count, metavar="N", help=text)
    text = f"how long to wait for the devices ({_SECONDS:g})"
    parser.add_argument(
        "--seconds", type=_options.positive_seconds, default=_SECONDS, help=text
    )
    options = parser.parse_args(arguments)
    answer, problem = _asked(options.seconds, options.simulate)
    problems = [problem] if problem else []
    if "TF_CONFIG" in os.environ and _cluster(os.environ["TF_CONFIG"]) is None:
        problems.append(
            "TF_CONFIG is not JSON with a `cluster` and a `task`; processes cannot "
            "meet."
        )
    if not options.simulate and "device info: cpu" in answer and _has_unused_gpu():
        problems.append(
            "This host has an NVIDIA GPU, and JAX uses the CPU only: its plugin is not "
            'installed or fails. `pip install --upgrade "jax[cuda13]"` installs it.'
        )
    settings = [f"{name}={value}" for name, value in _settings(os.environ).items()]
    for title, lines in (
        ("JAX and its devices", [f"jaxstrategy: {__version__}", *answer.splitlines()]),
        ("Environment", settings or ["none set"]),
        ("Problems", problems or ["none"]),
    ):
        print("\n".join([title, *(f"  {line}" for line in lines)]), end="\n\n")
    return 1 if problems else 0


def _asked(seconds: float, simulated: int | None) -> tuple[str, str | None]:
    program = f"from {__name__} import look; look({seconds}, {simulated})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=seconds + _STARTING,
        )
    except subprocess.TimeoutExpired as error:
        return "", f"JAX did not come up in {error.timeout:g} s."
    if done.returncode == 0:
        return done.stdout.strip(), None
    last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
    if "Timeout (" in done.stderr:
        return last, f"The devices gave no answer in {seconds:g} s."
    return last, f"JAX or a device failed, with exit code {done.returncode}."


def look(seconds: float, simulated: int | None) -> None:
    """Print what JAX says of this process, and the sum of its devices.

    Replica i gives i + 1, so that N replicas have N (N + 1) / 2.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    strategy = MirroredStrategy(simulate(simulated) if simulated else None)
    told = jax.print_environment_info(return_string=True) or ""
    lines = told.strip().splitlines()
    # Variables are told below, without secrets.
    print(*(line for line in lines if not re.match(r"\w+=", line)), sep="\n")
    n = strategy.num_replicas_in_sync
    given = np.arange(1, n + 1, dtype=np.float32)[:, None] * np.ones(1024, "f")
    total = strategy.run(_total, (strategy.per_replica(list(given)),))
    wanted = n * (n + 1) / 2
    who = f"{with_noun(n, 'replica')} on {strategy.devices[0].platform.upper()}"
    if not np.array_equal(np.asarray(total), np.full(1024, wanted)):
        sys.exit(
            f"The sum is wrong: {who} added 1 to {n} and got {np.asarray(total)[0]:g}, "
            f"not {wanted:g}."
        )
    print(f"{who}: the sum is right")


def _total(x: jax.Array) -> jax.Array:
    return get_replica_context().all_reduce("sum", x)


def _has_unused_gpu() -> bool:
    has_gpu = shutil.which("nvidia-smi") and Path("/dev/nvidia0").exists()
    return bool(has_gpu) and os.environ.get("JAX_PLATFORMS", "").lower() != "cpu"


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by name, as they may be shown to strangers."""
    shown = {}
    for name in sorted(environment):
        if not _WANTED.fullmatch(name) or _UNWANTED.fullmatch(name):
            continue
        shown[name] = _PASSWORD.sub("***", environment[name])
        if name == "TF_CONFIG":
            shown[name] = _cluster(environment[name]) or "(malformed)"
        if _SECRET.search(name):
            shown[name] = "(set; not shown)"
    return shown


def _cluster(text: str) -> str | None:
    """What `TF_CONFIG` says but for addresses; None if it cannot be understood."""
    try:
        config: Any = json.loads(text)
        jobs = [f"{job}: {len(hosts)}" for job, hosts in config["cluster"].items()]
        task = config["task"]
        return f"task {task['type']} {task['index']} of {', '.join(jobs)}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
