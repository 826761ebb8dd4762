"""The machine that benchmarks run on, and what else runs there."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
STAT = pathlib.Path("/proc/stat")
# The columns of /proc/stat in which a processor works: user, nice, system, interrupts
# of both kinds, and what the host gives to others. Guests are part of the first two.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


def about() -> dict[str, Any]:
    """The machine, the versions of what is measured, and when and of what that is."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "processor": processor(),
        "cores": cores(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "load": load(),
    }


def processor() -> str:
    """The model, as far as it is known."""
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """How many of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float:
    """Of the machine; 0 where it is not known."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return 0.0
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def load() -> float | None:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """Of the packages that matter and are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit, and whether files differ from it; nothing outside of a repository."""
    here = pathlib.Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        found = git("rev-parse", "--short", "HEAD")
        return f"{found}, changed" if git("status", "--porcelain", "-uno") else found
    except OSError:
        return ""


# What else runs.


class Watch:
    """Tells which share of the machine other processes have had since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def others(self) -> float | None:
        """The share of all cores; None where that cannot be known.

        Children of this process count as its own once it has waited for them.
        """
        seconds, busy, own = (
            b - a for a, b in zip(self._start, self._now(), strict=True)
        )
        if not STAT.exists() or seconds <= 0:
            return None
        return max(0.0, (busy - own) / (seconds * cores()))

    def _now(self) -> tuple[float, float, float]:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return time.perf_counter(), busy_seconds(), own


def busy_seconds() -> float:
    """Processor seconds since the start, of all processes on the cores of this one."""
    if not STAT.exists():
        return 0.0
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = 0
    for line in STAT.read_text().splitlines():
        name, *columns = line.split()
        if name in allowed:
            total += sum(int(columns[i]) for i in BUSY_COLUMNS)
    return total / os.sysconf("SC_CLK_TCK")


def others_now(seconds: float = 3.0) -> float | None:
    """The share of all cores that others have while this process waits.

    Where the system does not tell that: by the load average of the last minute.
    """
    watch = Watch()
    time.sleep(seconds)
    share = watch.others()
    average = load()
    if share is None and average is not None:
        return average / cores()
    return share
