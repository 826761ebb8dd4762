"""Processes that tests stop or look for (Linux)."""

import os
import pathlib
import signal
import time


def states_of(pid):
    """The state of each thread of a process: R, S, T, Z; none if it has ended."""
    states = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(task.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return states


def is_alive(pid):
    """Whether there is a process that has not ended."""
    return any(state not in "ZX" for state in states_of(pid))


def stop(pid):
    """Stops a process. `os.kill` comes back before all of its threads stand."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 60
    while not all(state in "TZX" for state in states_of(pid)):
        assert time.monotonic() < end, states_of(pid)
        time.sleep(0.001)


def children(parent=None):
    """Workers and parameter servers that a process has started: the newest by name."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "cmdline").read_text().rstrip("\0").rpartition("\0")[2]
            status = (path / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name.startswith(("worker ", "parameter server ")) and status[0] not in "ZX":
            if int(status[1]) == (parent or os.getpid()):
                # Not the largest number: the kernel begins anew after `pid_max`.
                began = int(status[19]), int(path.name)
                found[name] = max(began, found.get(name, began))
    return {name: pid for name, (_, pid) in found.items()}
