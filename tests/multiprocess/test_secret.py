"""Who does not know the job's secret takes no part, and the secret is not shown."""

import copy
import functools
import os
import pathlib
import pickle
import re
import runpy
import subprocess
import sys
import textwrap
import traceback

import harness
import pytest
from harness import Client, RefusedError, Secret, meets

import jaxstrategy
from jaxstrategy import ClusterError

VARIABLE, NETWORK = "JAXSTRATEGY_CLUSTER_SECRET", "JAXSTRATEGY_CLUSTER_NETWORK"
WORD = "correct horse battery staple"


@pytest.fixture
def attend(attend):
    return functools.partial(attend, word=WORD)


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
        assert "process 0 refused a caller: it has another JAX" in said
        assert WORD not in said + told and (not word or word not in said + told)
    zero = pool.submit(attend, 0, word="")
    with pytest.raises(ClusterError, match=f"has another {VARIABLE}"):
        attend(1)
    assert meets(zero, attend, word="")


def test_those_who_were_refused_are_told_where_some_did_not_come(address, attend, pool):
    zero = pool.submit(attend, 0, seconds=1.5)
    with pytest.raises(RefusedError):
        Client(address, Secret("a guess of a secret"))
    with pytest.raises(ClusterError) as caught:
        zero.result(10)
    assert re.search(
        "process 1 did not; callers with another JAXSTRATEGY_CLUSTER_SECRET, or none, "
        r"were refused \d times",
        str(caught.value),
    )


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
    from jaxstrategy._src.processes import rendezvous
    rank = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
    secret = os.environ["JAXSTRATEGY_CLUSTER_SECRET"]
    meeting = rendezvous.meet(rank, 2, os.environ["JAXSTRATEGY_COORDINATOR"], 30)
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret.encode() not in path.read_bytes()
    print(meeting, flush=True)
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
    assert done.stdout.count("Group(index=") == 4


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
