"""A Ray of several simulated machines, for tests, and what is left of it afterwards."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.processes import Program
from helpers.threads import until

DEADLINE = 150  # seconds; what takes longer has hung
# With the host's own address, Ray might connect a launcher to the added machine and not
# to the first one; it would then be lost with that machine.
ADDED = ["--node-ip-address=127.0.0.2"]
HEAD = """
import ray, sys
quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
started = ray.init(address="local", num_cpus=4, **quiet)
print(started.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


class Machine:
    """One that was added: `ray start` and the processes that it has started."""

    def __init__(self, process):
        self._process = process

    def kill(self):
        """Have it vanish, as if its power was cut."""
        for child in children(self._process.pid):
            os.kill(child, signal.SIGKILL)


def children(pid):
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == pid:
                yield int(path.parent.name)


class Ray:
    """Ray with a first machine, to which others can be added."""

    def __init__(self, folder):
        token = secrets.token_hex(32)
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            # A machine is given up after seconds, and not half a minute.
            "RAY_health_check_initial_delay_ms": "500",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.env.pop("RAY_ADDRESS", None)
        self._said = tempfile.TemporaryFile()
        self._head = subprocess.Popen(
            [sys.executable, "-P", "-c", HEAD],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )
        self.env["RAY_ADDRESS"] = self._head.stdout.readline().strip()
        assert self.env["RAY_ADDRESS"], self._show()

    def _show(self):
        self._said.seek(0)
        return self._said.read().decode()

    @contextlib.contextmanager
    def another_machine(self, *options):
        """Another machine of it, as long as this lasts: its process."""
        program = "from ray.scripts.scripts import main; main()"
        address = self.env["RAY_ADDRESS"]
        command = [sys.executable, "-c", program, "start", f"--address={address}"]
        with tempfile.TemporaryFile() as said:
            added = subprocess.Popen(
                [*command, "--block", "--num-cpus=4", *ADDED, *options],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

            def is_there():
                text = os.pread(said.fileno(), 1 << 16, 0)
                assert added.poll() is None, text.decode()
                return b"Ray runtime started" in text

            try:
                until(is_there, DEADLINE)
                yield Machine(added)
            finally:
                added.terminate()
                added.wait(DEADLINE)

    def close(self):
        self._head.stdin.close()
        self._head.stdout.close()
        self._head.wait(DEADLINE)
        self._said.close()


@contextlib.contextmanager
def running():
    """A Ray for the tests of one module; skips them where Ray is not installed."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "ray"')
    # Not in pytest's own folder: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        started = Ray(folder)
        try:
            yield started
        finally:
            started.close()


def program(folder, arguments, env):
    """A Python program at work in a folder of its own."""
    return Program(folder / "out.txt", [sys.executable, *arguments], env, folder)
