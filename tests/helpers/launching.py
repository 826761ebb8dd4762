"""Runs `python -m jaxstrategy.launch`, in this process where it starts no other."""

import contextlib
import dataclasses
import io
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jaxstrategy

DEADLINE = 60  # seconds; what takes longer has hung

# The launcher needs the standard library only, so it is tried, and is fast, without
# the package around it.
ALONE = f"""
import runpy, sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(Path(jaxstrategy.__file__).parent)!r}]
sys.modules |= {{"jaxstrategy": package, "jax": None, "numpy": None}}
runpy.run_module("jaxstrategy.launch", run_name="__main__", alter_sys=True)
"""


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    def __repr__(self):
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def lines(self):
        return sorted(self.out.splitlines())

    @property
    def last(self):
        return self.err.splitlines()[-1]


def command(*arguments):
    """How the launcher ends in this process, and what it says."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["launch", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_module("jaxstrategy.launch", run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        out.flush()
    return Result(code, os.fsdecode(out.buffer.getvalue()), err.getvalue())


def printed(kind, script, *arguments, options=""):
    """What the launcher prints for a cluster."""
    done = command("--print", kind, *options.split(), "--", script, *arguments)
    assert (done.code, done.err) == (0, ""), done
    return done.out


class Launched:
    """A launcher at work in a folder of its own."""

    def __init__(self, folder, command, env=None, stdout=subprocess.PIPE):
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, code=None):
        try:
            out, err = self.process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"It has hung.\n{Result(-9, out, err)}") from None
        result = Result(self.process.returncode, out, err)
        assert code is None or result.code == code, result
        return result

    def pids(self, *names):
        """The numbers in these files of the workers, once they are there."""
        paths = [self.folder / name for name in names]
        self.until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def until(self, claim):
        end = time.monotonic() + DEADLINE
        while not claim():
            if time.monotonic() > end:
                self.process.kill()
                out, err = self.process.communicate()
                raise AssertionError(f"It never came true.\n{Result(-9, out, err)}")
            time.sleep(0.01)

    def stop(self):
        self.process.kill()
        self.process.communicate()
