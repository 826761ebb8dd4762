"""Processes meet, or every one of them says why they could not."""

import concurrent.futures
import contextlib
import socket
import textwrap
import threading
import time

import pytest
from harness import (
    STARTED,
    VERSIONS,
    Client,
    RefusedError,
    Secret,
    meet as meet_others,
    rendezvous,
    until,
)

import jaxstrategy as js

WORD = "correct horse battery staple"


def texts(results):
    assert all(isinstance(result, js.ClusterError) for result in results), results
    return [str(result) for result in results]


def one_text(results):
    (text,) = set(texts(results))
    return text


@contextlib.contextmanager
def server(address, answer):
    """Another program that listens there: `answer(connection)` to each call."""
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as listener:
        kept = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    kept.append(listener.accept()[0])
                    answer(kept[-1])

        threading.Thread(target=serve, daemon=True).start()
        yield
        for connection in kept:
            connection.close()


def test_all_know_all_members(meet):
    meetings = meet(*({"index": k, "count": 4} for k in (2, 0, 3, 1)))
    names = [
        "process 0 (host host1, pid 101)",
        "process 1 (host host3, pid 103)",
        "process 2 (host host0, pid 100)",
        "process 3 (host host2, pid 102)",
    ]
    for meeting in meetings:
        assert [str(member) for member in meeting.members] == names
    assert [meeting.index for meeting in meetings] == [2, 0, 3, 1]


def test_an_id_given_twice(meet):
    text = one_text(meet(*({"index": k, "count": 3} for k in (0, 1, 1))))
    assert "process id 1 was given to pid 10" in text
    assert "on host host1" in text and "on host host2" in text


def test_different_numbers_of_processes(meet):
    text = one_text(meet({"index": 0, "count": 2}, {"index": 1, "count": 3}))
    assert (
        "process 1 (host host1, pid 101) was told that there are 3 processes, "
        "process 0 (host host0, pid 100) that there are 2"
    ) in text


def test_different_versions(meet):
    older = {**VERSIONS, "jaxlib": "0.10.2", "Python": "3.11"}
    text = one_text(
        meet({"index": 0, "count": 2}, {"index": 1, "count": 2, "versions": older})
    )
    assert "process 1 (host host1, pid 101) has jaxlib 0.10.2, process 0" in text
    assert "jaxlib 0.12.0" in text and "Python" not in text


def test_others_wait_as_long_as_process_0_and_are_told_of_any_end():
    """As soon as it listens, and whatever comes in the moment that all have met."""
    secret = Secret(WORD)
    host = rendezvous.Host("127.0.0.1:0", secret, 60)
    with contextlib.closing(host):
        client = Client(host.address, secret)
        said = rendezvous.read(client.request())
        client.close()
        assert 50 < said["seconds"] <= 60
        other = Client(f"127.0.0.1:{said['port']}", secret)
        other.submit(rendezvous.written({"index": 1, "count": 2}))
        until(lambda: host._calls)
        (peer,) = host._calls
        with host._changed:  # as process 0 has it while it gives the verdict
            other.close()
            time.sleep(0.3)
            host.peers = {1: peer}
        ended = []
        host.begin(lambda request: None, ended.append)
        until(lambda: ended == [peer])


def test_processes_that_do_not_come_are_named(meet):
    text = one_text(
        meet(*({"index": k, "count": 5, "seconds": 0.8} for k in (0, 1, 3)))
    )
    assert "3 of 5 processes came within 0.8 s; processes 2, 4 did not" in text


def test_nobody_answers(address):
    with pytest.raises(js.ClusterError) as caught:
        meet_others(1, 2, address, 0.5)
    text = str(caught.value)
    assert f"could not reach process 0 at the coordinator's address {address}" in text
    assert "within 0.5 s: Connection refused" in text


@pytest.mark.parametrize(
    "answer, does",
    [
        (lambda sock: sock.sendall(b"220 mail.example.com\r\n" * 3), "speak our proto"),
        (lambda sock: None, "does not answer"),
        (lambda sock: sock.close(), "closes the connection"),
    ],
    ids=["other-protocol", "silent", "hangs-up"],
)
def test_another_program_at_the_port(answer, does, address, monkeypatch):
    monkeypatch.setattr(rendezvous, "CLOSED_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.5)
    with server(address, answer):
        with pytest.raises(js.ClusterError, match="use by another program") as zero:
            meet_others(0, 2, address, 5)
        with pytest.raises(js.ClusterError, match=does) as one:
            meet_others(1, 2, address, 600)  # it does not wait so long
    assert "Process 0 cannot listen" in str(zero.value) and address in str(zero.value)
    assert "The port is in use" in str(one.value) and address in str(one.value)


def test_a_process_of_another_job_is_refused_and_the_job_goes_on(address, join):
    def told(job):
        return {"host": "h", "pid": ord(job), "versions": VERSIONS, "job": job}

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        zero = pool.submit(join, 0, 2, address, 20, told("a"))
        with pytest.raises(js.ClusterError) as caught:
            join(1, 2, address, 20, told("b"))
        join(1, 2, address, 20, told("a"))
        assert [member.pid for member in zero.result().members] == [97, 97]
    assert "process 1 (host h, pid 98) belongs to job 'b'" in str(caught.value)
    assert "Give each job a port of its own" in str(caught.value)


def test_a_job_starts_computes_and_ends_while_strangers_call(job, tmp_path, count=2):
    script = """
    assert float(total(RANK + 1)) == 2 * sum(range(1, COUNT + 1))
    assert board.gather("rows", [RANK, "x"]) == [[k, "x"] for k in range(COUNT)]
    assert _processes.start() is _processes.current() is processes
    assert _processes.start(Process(RANK, COUNT, ADDRESS)) is processes
    try:
        _processes.start(Process(RANK + 1, COUNT + 1, ADDRESS))
    except RuntimeError as error:
        print(type(error).__name__, error)
    assert (processes.index, processes.count) == (RANK, jax.process_count())
    end = time.monotonic() + 20
    while RANK and board.states()[RANK - 1].end != "left":  # who ends first waits
        assert time.monotonic() < end
        time.sleep(0.01)
    # Python is left as it is, and each keeps its exit code.
    assert type(sys.exit).__name__ == "builtin_function_or_method"
    assert type(exit).__name__ == "Quitter"
    if sys.version_info >= (3, 12):
        assert not any(map(sys.monitoring.get_tool, range(6)))
    try:
        sys.exit(4)
    except SystemExit as error:
        print("caught", error.code)
    if RANK:
        raise SystemExit(RANK)
    sys.exit(COUNT)
    """
    late = f"""
    import pathlib, time
    while not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    """
    whole = STARTED + textwrap.dedent(script)
    scripts = {k: textwrap.dedent(late) + whole for k in range(1, count)}
    env = {"JAX_NUM_CPU_DEVICES": "2", "JAXSTRATEGY_CLUSTER_SECRET": WORD}
    with job(
        scripts={0: whole, **scripts}, count=count, env=env, started=False
    ) as running:
        for word in ("", "a guess of a secret"):
            with pytest.raises(RefusedError):
                Client(running.address, Secret(word))
        (tmp_path / "go").touch()
        assert running.wait(50) == [count, *range(1, count)]
        for rank in running.ranks:
            assert (
                f"ClusterError This process is {rank.index} of {count}" in rank.output
            )
            assert rank.last_line == "caught 4" and WORD not in rank.output


@pytest.mark.slow
def test_jax_that_has_computed_already_cannot_join(job):
    early = "import jax, jax.numpy as jnp; jnp.zeros(2).block_until_ready()\n"
    scripts = {0: STARTED, 1: early + STARTED}
    with job(scripts=scripts, started=False) as running:
        assert running.wait(40) == [76, 1]
    assert "ClusterError: Process 1 of 2 met the others, but JAX" in (
        running.ranks[1].last_line
    )
    assert "process 1" in running.ranks[0].last_line
    assert "failed: RuntimeError" in running.ranks[0].last_line
