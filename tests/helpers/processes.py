"""Processes that tests start, stop or look for (Linux)."""

import contextlib
import os
import pathlib
import signal
import subprocess
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


def with_variable(text):
    """The environments of the processes in whose there is a text, by their numbers."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = path.read_bytes().decode(errors="replace")
            if text in variables:
                found[int(path.parent.name)] = variables
    return found


class Program:
    """A program at work, whose output goes into a file."""

    def __init__(self, path, command, env=None, folder=None, mode="wb"):
        self.path = pathlib.Path(path)
        with open(path, mode) as out:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self):
        return self.path.read_text(errors="replace")

    @property
    def last_line(self):
        return self.output.rstrip().rsplit("\n", 1)[-1]

    @property
    def code(self):
        return self.process.poll()

    def wait_until(self, claim, seconds=150):
        """Waits as long as the program lasts."""
        end = time.monotonic() + seconds
        while not claim():
            assert self.code is None or claim(), self.output
            assert time.monotonic() < end, f"it has not come true\n{self.output}"
            time.sleep(0.02)

    def wait_for(self, text):
        self.wait_until(lambda: text in self.output)

    def finish(self, code=0, seconds=150):
        """Ends the program's input, for which it may wait; all that it has said."""
        self.process.stdin.close()
        found = self.process.wait(seconds)
        assert found == code, f"exit code {found}\n{self.output}"
        return self.output

    def close(self):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
