"""How many seconds after a fault all processes of a job have ended.

    python benchmarks/faults.py [name ...]

The faults are those of the README's table and of `tests/multiprocess/`, whose programs
run here. Seconds are counted from the fault to the end of the last process; where a
watchdog has to find it, its `timeout_seconds`, 4 here, is taken off.
"""

import argparse
import pathlib
import re
import socket
import sys
import tempfile
import time

HERE = str(pathlib.Path(__file__).parent.parent / "tests" / "multiprocess")
sys.path.insert(0, HERE)

import harness  # noqa: E402  # the tests' own

TIMEOUT_SECONDS = 4
DEADLINE = 120  # seconds

MARKS = """
import time

def mark():
    print("MARK", time.time(), flush=True)

slept = time.sleep

def sleep(seconds):
    if seconds >= 600:
        mark()
    slept(seconds)

time.sleep = sleep
"""
# What each process trains, process 1 until its 30th step.
LOOP = """
for step in range(100_000):
    if step == 30 and RANK == 1:
        mark()
        {}
    out = total(RANK)
    if step % 5 == 0:
        float(out)
    time.sleep(0.005)
"""
SAVES = """
from jaxstrategy.checkpoint import CheckpointManager
saved = CheckpointManager.save

def save(*args, **kwargs):
    mark()
    return saved(*args, **kwargs)

CheckpointManager.save = save
"""
LEAVES_OUT = """
from workers import hanging
rows = hanging.rows

def marked(context):
    for number, batch in enumerate(rows(context)):
        if hanging.RANK == 1 and number == 5:
            mark()
        yield batch

hanging.rows = marked
"""
PORT = f"""{MARKS}
import jaxstrategy as js
mark()
js.MultiWorkerMirroredStrategy()
"""


def loop(fault: str) -> str:
    return harness.STARTED + MARKS + LOOP.format(fault)


def hanging(case: str, before: str = "") -> str:
    return f"{MARKS}{before}\nfrom workers import hanging\nhanging.main({case!r})"


def ending(way: str) -> str:
    return f"{MARKS}\nfrom workers import endings\nmark()\nendings.{way}()"


def killed(number: str) -> str:
    return loop(f"os.kill(os.getpid(), signal.{number})")


# Of each fault: what runs, and whether the watchdog has to find it.
FAULTS: dict[str, tuple[str, bool]] = {
    "killed": (killed("SIGKILL"), False),
    "SIGTERM": (killed("SIGTERM"), False),
    "stopped": (killed("SIGSTOP"), True),
    "exception": (loop("raise ValueError('no such digit')"), False),
    "exit code": (loop("sys.exit(9)"), False),
    "all fail": (
        harness.STARTED + MARKS + "float(total(RANK)); mark(); raise ValueError(RANK)",
        False,
    ),
    "leaves early": (loop("break"), False),
    "another program": (ending("another_program"), False),
    "another value": (ending("another_exchange"), False),
    "leaves out a step": (hanging("skip", LEAVES_OUT), False),
    "asleep before a new step": (hanging("asleep before new"), True),
    "asleep before a known step": (hanging("asleep before known"), True),
    "stuck reader": (hanging("reader"), True),
    "one saves": (hanging("save one-sided"), True),
    "one restores": (hanging("restore one-sided"), True),
    "saves another folder": (hanging("save another folder", SAVES), False),
    "saves other leaves": (hanging("save other leaves", SAVES), False),
    "dies while reading": (
        f"{MARKS}\nfrom workers import faults\nkill = faults.os.kill\n"
        "faults.os.kill = lambda *args: (mark(), kill(*args))\n"
        "faults.main('reader', 1)",
        False,
    ),
    "the port is taken": (PORT, False),
}


def seconds(script: str) -> float:
    """From the last mark to the end of all processes that can end."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        env = {"PYTHONPATH": HERE}
        if script is PORT:
            env["JAXSTRATEGY_COORDINATOR"] = f"127.0.0.1:{taken.getsockname()[1]}"
        # One that is stopped does not end, nor does one that waits for a coordinator.
        ends = (0,) if script is PORT or "SIGSTOP" in script else ()
        options = {"seconds": TIMEOUT_SECONDS, "env": env, "started": False}
        with harness.job(folder, script, **options) as running:
            running.wait(DEADLINE, *ends)
            ended = time.time()
            replies = running.ranks[:1] if script is PORT else running.ranks
            said = "".join(rank.output for rank in replies)
            return ended - max(map(float, re.findall(r"MARK ([\d.]+)", said)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name")
    names = parser.parse_args().names or list(FAULTS)
    for name in names:
        script, is_watched = FAULTS[name]
        taken = seconds(script)
        told = f"t + {taken - TIMEOUT_SECONDS:.1f}" if is_watched else f"{taken:.1f}"
        print(f"{name:28}{told:>10}", flush=True)


if __name__ == "__main__":
    main()
