"""Who does not know the job's secret takes no part, and the secret is not shown."""

import copy
import functools
import pickle
import re
import runpy
import sys
import traceback

import pytest
from harness import Client, RefusedError, Secret, meets
from helpers.processes import free_address

from jaxstrategy import ClusterError

VARIABLE, NETWORK = "JAXSTRATEGY_CLUSTER_SECRET", "JAXSTRATEGY_CLUSTER_NETWORK"
WORD = "correct horse battery staple"


@pytest.fixture
def attend(attend):
    return functools.partial(attend, word=WORD)


# Proving


def test_another_secret_is_refused_alone_and_told(attend, pool, capfd):
    for word, own in (("", "has none"), ("another secret of a job", "has one")):
        at = free_address()
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
