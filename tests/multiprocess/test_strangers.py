"""Whoever calls, and whatever is said before all have met, stops no job."""

import contextlib
import pathlib
import socket
import textwrap

import pytest

import jaxstrategy


def called(address):
    """A plain connection to process 0, as soon as it listens."""
    host, port = address.split(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), 20)


# Without the package around it the rendezvous is there at once.
ALONE = f"""
import os, resource, sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(pathlib.Path(jaxstrategy.__file__).parent)!r}]
sys.modules["jaxstrategy"] = package
from jaxstrategy._src.processes import rendezvous
RANK = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
def meet():
    return rendezvous.meet(RANK, 2, os.environ["JAXSTRATEGY_COORDINATOR"], 30)
"""


@pytest.mark.slow
def test_more_callers_than_descriptors_do_not_stop_a_job(job, tmp_path):
    go = tmp_path / "go"
    scripts = {
        0: """
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        meeting = meet()
        print("met", len(meeting.members))
        """,
        1: f"""
        import time
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        print("met", len(meet().members))
        """,
    }
    scripts = {rank: ALONE + textwrap.dedent(text) for rank, text in scripts.items()}
    with (
        job(scripts=scripts, started=False) as running,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(100):
            stack.enter_context(called(running.address))
        go.touch()
        assert running.wait(30) == [0, 0]
        assert [rank.last_line for rank in running.ranks] == ["met 2", "met 2"]
