"""The devices that JAX sees, and whether they add up what they are given.

All of it goes on in a process of its own, with a deadline: an accelerator that somebody
else holds, or a driver that does not fit, may never answer or may end the process.

    python -m jaxstrategy.doctor._device_answers 100 [SIMULATED]
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jaxstrategy.replicas._devices import Device, simulate
from jaxstrategy.strategies._current import get_replica_context
from jaxstrategy.strategies._mirrored import MirroredStrategy
from jaxstrategy.text._units import with_bytes, with_noun

_BEGIN = "jaxstrategy.doctor: "
_ELEMENTS = 1024
_STARTING = 60.0  # seconds; a busy host needs long to import JAX


@dataclasses.dataclass(frozen=True)
class DeviceAnswers:
    """What the devices have answered.

    Attributes:
      devices: a line for each kind.
      collective: what they have summed; None if nothing came.
      problem: what went wrong, in a sentence; None if nothing did.
      output: the last lines that the process has printed, if something went wrong.
    """

    devices: tuple[str, ...] = ()
    collective: str | None = None
    problem: str | None = None
    output: str | None = None


def asked(seconds: float, simulated: int | None) -> DeviceAnswers:
    """Has another process look; waits for it no longer than so many seconds."""
    module = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
    arguments = [str(seconds), *([str(simulated)] if simulated else [])]
    try:
        done = subprocess.run(
            module + arguments,
            capture_output=True,
            text=True,
            timeout=seconds + _STARTING,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace")
        waited = f"JAX did not come up in {error.timeout:g} s"
        return _failed(waited, printed)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_BEGIN)]
    if lines:
        said = json.loads(lines[-1].removeprefix(_BEGIN))
        return DeviceAnswers(**said | {"devices": tuple(said["devices"])})
    if "Timeout (" in done.stderr:
        return _failed(f"The devices gave no answer in {seconds:g} s", done.stderr)
    return _failed(f"JAX ended with exit code {done.returncode}", done.stderr)


def _failed(problem: str, output: str) -> DeviceAnswers:
    last = "\n".join(output.strip().splitlines()[-20:])
    return DeviceAnswers(problem=f"{problem}.", output=last or None)


def look(simulated: int | None) -> DeviceAnswers:
    """The devices of this process, asked for a sum."""
    try:
        devices = simulate(simulated) if simulated else None
        described = _described(devices or jax.local_devices())
        return _summed(MirroredStrategy(devices), described)
    except Exception as error:  # of any driver; it is told, not hidden
        return _failed("JAX or a device failed", f"{type(error).__name__}: {error}")


def _summed(strategy: MirroredStrategy, devices: tuple[str, ...]) -> DeviceAnswers:
    """Replica i gives i + 1, so that N replicas have N (N + 1) / 2."""
    n = strategy.num_replicas_in_sync
    given = np.arange(1, n + 1, dtype=np.float32)[:, None] * np.ones(_ELEMENTS, "f")
    total = strategy.run(_total, (strategy.per_replica(list(given)),))
    wanted = n * (n + 1) / 2
    on = strategy.extended.worker_devices[0].platform.upper()
    who = f"{with_noun(n, 'replica')} on {on}"
    if not np.array_equal(np.asarray(total), np.full(_ELEMENTS, wanted)):
        told = f"{who} added 1 to {n} and got {np.asarray(total)[0]:g}, not {wanted:g}."
        return DeviceAnswers(devices, problem=f"The sum is wrong: {told}")
    return DeviceAnswers(devices, f"{who}: the sum is right")


def _total(x: jax.Array) -> jax.Array:
    return get_replica_context().all_reduce("sum", x)


def _described(devices: Sequence[Device]) -> tuple[str, ...]:
    """A line for the devices of each kind."""
    kinds: dict[str, list[Device]] = {}
    for device in devices:
        kinds.setdefault(f"{device.platform} ({device.device_kind})", []).append(device)
    return tuple(
        f"{len(same)} x {kind}{_memory(same[0])}" for kind, same in kinds.items()
    )


def _memory(device: Device) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f", {with_bytes(limit)} each" if limit else ""


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    answers = look(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(_BEGIN + json.dumps(dataclasses.asdict(answers)), flush=True)
