"""Who does not know the job's secret takes no part, and the secret is not shown."""

import contextlib
import copy
import functools
import os
import pathlib
import pickle
import runpy
import socket
import subprocess
import sys
import textwrap
import threading
import traceback

import harness
import peer
import pytest
from harness import STARTED, VERSIONS, meets

import jaxstrategy
from jaxstrategy import ClusterError
from jaxstrategy.processes._secret import Secret

VARIABLE, NETWORK = "JAXSTRATEGY_CLUSTER_SECRET", "JAXSTRATEGY_CLUSTER_NETWORK"
WORD = "correct horse battery staple"
HELLO = {"index": 1, "count": 2, "host": "h", "pid": 7, "versions": VERSIONS}


@pytest.fixture
def attend(attend):
    return functools.partial(attend, word=WORD)


# Proving


def test_another_secret_is_refused_alone_and_told(attend, pool, capfd):
    for word, own in (("", "has none"), ("another secret of a job", "has one")):
        at = harness.free_address()
        zero = pool.submit(attend, 0, at=at)
        with pytest.raises(ClusterError) as caught:
            attend(1, word=word, at=at)
        assert meets(zero, attend, at=at)
        told = str(caught.value)
        assert f"address {at} has another {VARIABLE} than" in told
        assert f"process 1 (host h1), which {own}. Give all processes" in told
        said = capfd.readouterr().err
        assert "process 0 refused a caller from 127.0.0.1: it has another JAX" in said
        assert WORD not in said + told and (not word or word not in said + told)
    zero = pool.submit(attend, 0, word="")
    with pytest.raises(ClusterError, match=f"has another {VARIABLE}"):
        attend(1)
    assert meets(zero, attend, word="")


def test_a_stranger_cannot_end_the_job_by_what_it_says(address, attend, pool):
    """Nor does process 0 say anything to who has proved nothing."""
    zero = pool.submit(attend, 0)
    for hello in (HELLO, {**HELLO, "count": 3}, {**HELLO, "index": 9}):
        for secret in ("", "a guess of a secret"):
            stranger = peer.guest(address, hello, secret)
            assert peer.read(stranger.sock, 100) == peer.REFUSAL
            stranger.sock.close()
    for place in (0, 3, 4, 20, -33, -32, -1):  # changed on its way
        one = peer.Peer(peer.call(address), WORD).greet().hear()
        frame = bytearray(one.frame(b'{"index": 1, "count": 2}'))
        frame[place] ^= 1
        one.sock.sendall(frame)
        if 0 < place < 4:  # the length: the rest of it does not come
            one.sock.shutdown(socket.SHUT_WR)
        assert peer.read(one.sock, 100) in (peer.REFUSAL, b"")
        one.sock.close()
    assert meets(zero, attend)


def test_those_who_were_refused_are_counted_where_some_did_not_come(
    address, attend, pool
):
    zero = pool.submit(attend, 0, seconds=1.5)
    for _ in range(2):
        stranger = peer.guest(address, HELLO, "a guess of a secret")
        assert peer.read(stranger.sock, 100) == peer.REFUSAL
        stranger.sock.close()
    with pytest.raises(ClusterError) as caught:
        zero.result(10)
    assert (
        "process 1 did not; callers with another JAXSTRATEGY_CLUSTER_SECRET, or none, "
        "were refused 2 times, the last one from 127.0.0.1"
    ) in str(caught.value)


def test_nonces_are_fresh(address, attend, pool):
    zero = pool.submit(attend, 0)
    nonces = set()
    for _ in range(5):
        caller = peer.Peer(peer.call(address), nonce=bytes(32)).greet().hear()
        nonces.add(caller.other)
        caller.sock.close()
    assert len(nonces) == 5 and bytes(32) not in nonces
    assert meets(zero, attend)


# Attacks by who can listen, or stands between


@contextlib.contextmanager
def deceived(attend, pool):
    """A connection of process 1 to a false process 0, and what comes of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        one = pool.submit(attend, 1, at=at)
        sock, _ = listener.accept()
    with sock:
        yield sock, one
        told = str(one.exception(10))
        assert f"{at} has another JAXSTRATEGY_CLUSTER_SECRET than process 1" in told


def read_frame(sock):
    size = peer.read(sock, 4)
    return size + peer.read(sock, int.from_bytes(size, "big") + 32)


def test_a_hello_cannot_be_said_again(address, attend, pool):
    with deceived(attend, pool) as (sock, _):
        false = peer.Peer(sock, is_host=True).hear().greet()
        frame = read_frame(sock)
        sock.sendall(peer.REFUSAL)
    zero = pool.submit(attend, 0)
    # With the same nonce of the guest's; process 0's is its own.
    with peer.call(address) as sock:
        peer.Peer(sock, nonce=false.other).greet().hear()
        sock.sendall(frame)
        assert peer.read(sock, 1000) == peer.REFUSAL
    assert meets(zero, attend)


def test_what_a_guest_says_does_not_prove_process_0(attend, pool):
    """Reflection: its own nonce and its own hello are sent back to it."""
    with deceived(attend, pool) as (sock, _):
        sock.sendall(peer.read(sock, len(peer.GREETING) + 32))
        sock.sendall(read_frame(sock))


def test_what_process_0_says_does_not_prove_a_guest(address, attend, pool):
    """Reflection: its own nonces are sent back to it, and its own words."""
    zero = pool.submit(attend, 0)
    with peer.call(address) as sock, peer.call(address) as other:
        nonce = peer.Peer(other).greet().hear().other
        stranger = peer.Peer(sock, nonce=nonce).greet().hear()
        stranger.send(HELLO)
        assert peer.read(sock, 1000) == peer.REFUSAL
    with peer.call(address) as sock:
        stranger = peer.Peer(sock).greet().hear()
        sock.sendall(peer.REFUSAL)  # all that it says to strangers
        assert peer.read(sock, 1000) == b""
    assert meets(zero, attend)


def test_a_guest_believes_no_verdict_of_a_stranger(attend, pool):
    with deceived(attend, pool) as (sock, _):
        false = peer.Peer(sock, "a guess of a secret", is_host=True).hear().greet()
        false.send({"verdict": "", "members": [[0, "evil", 1], [1, "h1", 1]]})


class Relay:
    """Stands between process 1 and process 0, and may change what they say.

    Args:
      change: given `to_host` and the number of a message, and its bytes; returns what
        is passed on.
    """

    def __init__(self, address, change):
        self._address = address
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._socks = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        sock, _ = self._listener.accept()
        self._socks = [sock, peer.call(self._address)]
        for to_host in (True, False):
            threading.Thread(target=self._pass, args=(to_host,), daemon=True).start()

    def _pass(self, to_host):
        source, sink = self._socks[:: 1 if to_host else -1]
        try:
            sink.sendall(peer.read(source, len(peer.GREETING) + 32, 30))
            for number in range(1000):
                size = peer.read(source, 4, 30)
                frame = size + peer.read(source, int.from_bytes(size, "big") + 32, 30)
                if len(size) < 4:
                    break
                sink.sendall(self._change(to_host, number, frame))
        except OSError:
            pass
        for sock in (source, sink):
            sock.close()

    def close(self):
        for sock in (*self._socks, self._listener):
            sock.close()


def flipped(frame):
    return frame[:-40] + bytes([frame[-40] ^ 1]) + frame[-39:]


_CHANGES = {
    "changed": lambda old, frame: flipped(frame),
    "twice": lambda old, frame: frame + frame,
    "left out": lambda old, frame: b"",
    "an older one": lambda old, frame: old,
}


@pytest.mark.parametrize("change", _CHANGES)
def test_messages_after_the_meeting_cannot_be_changed(
    change, address, attend, pool, board
):
    """The connection ends, and nothing wrong is believed."""
    to_host = change in ("changed", "an older one")
    # To the host: hello, put 1, put 2. To the guest: welcome, verdict, news.
    older = {}

    def changed(is_to_host, number, frame):
        if is_to_host is to_host:
            older[number] = frame
            if number == 2:
                return _CHANGES[change](older[1], frame)
        return frame

    relay = Relay(address, changed)
    zero = pool.submit(attend, 0)
    one = attend(1, at=relay.address)
    boards = [board(zero.result(10)), board(one)]
    told = []
    boards[not to_host].on_departure(lambda departure: told.append(str(departure)))
    boards[1].put("key", "right")
    harness.until(lambda: told)  # pings follow on what was left out
    who = "process 1" if to_host else "process 0"
    assert told[0].startswith(who), told
    assert "its messages make no sense: a message is not of the job" in told[0]
    for each in boards[::-1]:
        each.fail("the test is over")
    relay.close()


# Where processes may meet


def test_without_a_secret_only_the_loopback_will_do(attend, monkeypatch):
    hosts = ["0.0.0.0", "192.0.2.1", "[::]", "128.0.0.1", "no-such-host.invalid"]
    for index, host in enumerate(hosts):
        with pytest.raises(ClusterError) as caught:
            attend(index % 2, word="", at=f"{host}:2222")
        text = str(caught.value)
        assert f"{host.strip('[]')} can be reached from other hosts, and the j" in text
        assert f"Set {VARIABLE} to the same random word" in text
        assert f"Or set {NETWORK}=trusted if nobody else" in text
    monkeypatch.setenv(NETWORK, "trusted")
    with pytest.raises(ClusterError, match=r"cannot listen .*has no address"):
        attend(0, word="", at="192.0.2.1:2222", seconds=0.1)


def test_an_environment_that_cannot_be_meant(join, monkeypatch):
    for name, value, text in [
        (VARIABLE, "", f"{VARIABLE} is set and empty"),
        (VARIABLE, " \n", f"{VARIABLE} is set and empty"),
        (VARIABLE, "hunter2", r"CLUSTER_SECRET is wrong. A secret of 7 char"),
        (NETWORK, "yes", f"{NETWORK} is 'yes'. It is `trus"),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=text) as caught:
                join(0, 2, "192.0.2.1:2222", 0.1)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


# Where the secret is seen


def test_a_secret_does_not_print():
    secret = Secret(WORD)
    shown = [repr(secret), str(secret), f"{secret}", repr([secret]), repr(vars)]
    shown += [repr(getattr(secret, "__dict__", {})), repr(secret.key(b"a purpose"))]
    assert not any(WORD in text for text in shown)
    for written in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="A secret is not written anywhere"):
            written(secret)
    assert len({Secret.random().variables()[VARIABLE] for _ in range(5)}) == 5


# Launchers and meetings need the standard library only: without the package around them
# they are there at once.
ALONE = f"""
import sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(pathlib.Path(jaxstrategy.__file__).parent)!r}]
sys.modules["jaxstrategy"] = package
"""


def test_the_launcher_gives_a_secret_that_nobody_sees(tmp_path):
    """It is in the environment of the workers: not in an argument, not printed."""
    script = """
    import contextlib, os, pathlib
    from jaxstrategy.processes import _rendezvous
    rank = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
    secret = os.environ["JAXSTRATEGY_CLUSTER_SECRET"]
    meeting = _rendezvous.meet(rank, 2, os.environ["JAXSTRATEGY_COORDINATOR"], 30)
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret.encode() not in path.read_bytes()
    print(meeting, dict(meeting.connections), flush=True)
    pathlib.Path(f"secret{rank}").write_text(secret)
    raise SystemExit(0 if os.environ["JAXSTRATEGY_ATTEMPT"] == "1" else 5)
    """
    (tmp_path / "script.py").write_text(ALONE + textwrap.dedent(script))
    launcher = (
        f"{ALONE}import runpy\nrunpy.run_module('jaxstrategy.launch', None, '__main__')"
    )
    options = ["-n", "2", "--max-restarts", "1", "--verbose"]
    done = subprocess.run(
        [sys.executable, "-c", launcher, *options, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"JAXSTRATEGY_CLUSTER_SECRET": WORD},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (secret,) = {(tmp_path / f"secret{rank}").read_text() for rank in range(2)}
    assert len(secret) == 64 and secret not in said and WORD not in said
    assert done.stdout.count("Meeting(index=") == 4


def test_several_launchers_need_a_secret_from_their_user(monkeypatch, capsys):
    def complaint(address):
        options = ["--nodes", "2", "--node-rank", "0", "--coordinator", address]
        monkeypatch.setattr(sys, "argv", ["launch", *options, "missing.py"])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_module("jaxstrategy.launch", run_name="__main__")
        return capsys.readouterr().err

    needs = "of --nodes do not start: 192.0.2.1 can be reached from other"
    assert needs in complaint("192.0.2.1:2222")
    assert needs not in complaint("127.0.0.1:2222") + complaint("[::1]:2222")
    monkeypatch.setenv(VARIABLE, "hunter2")
    said = complaint("192.0.2.1:2222")
    assert "at least 16 random ones are wanted" in said and "hunter2" not in said
    monkeypatch.setenv(VARIABLE, WORD)
    assert needs not in complaint("192.0.2.1:2222")


# Jobs


def test_a_job_with_a_secret_runs_while_strangers_call(job, tmp_path):
    script = """
    assert float(total(RANK + 1)) == 2 * (1 + 2)
    assert board.gather("rows", RANK) == [0, 1]
    print("done")
    """
    late = f"""
    import pathlib, time
    while not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    """
    whole = STARTED + textwrap.dedent(script)
    scripts = {0: whole, 1: textwrap.dedent(late) + whole}
    env = {"JAX_NUM_CPU_DEVICES": "2", VARIABLE: WORD}
    with job(scripts=scripts, env=env, started=False) as running:
        for words in ("", "a guess of a secret"):
            taker = peer.Peer(peer.call(running.address, 40), words).greet().hear()
            taker.send(HELLO)
            assert peer.read(taker.sock, 1000) == peer.REFUSAL
            taker.sock.close()
        (tmp_path / "go").touch()
        assert running.wait(60) == [0, 0]
        assert all(rank.last_line == "done" for rank in running.ranks)
        assert not any(WORD in rank.output for rank in running.ranks)
