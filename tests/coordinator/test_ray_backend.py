"""What `RayProcesses` refuses before Ray is asked."""

import sys

import pytest

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.backends import ray_processes
from jaxstrategy.coordinator import RayProcesses


def test_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for given, kind, said in [
        ({"workers": 0}, ValueError, "`workers`"),
        ({"parameter_servers": 0}, ValueError, "`parameter_servers`"),
        ({"workers": 1.5}, TypeError, "`workers`"),
        ({"devices_per_worker": 0}, ValueError, "`devices_per_worker`"),
        ({"placement": "near"}, ValueError, "`placement` was 'near'; one of PACK, SP"),
        ({"cpus_per_worker": 0}, ValueError, "such as 0.1 CPUs"),
        ({"cpus_per_server": 0}, ValueError, "such as 0.1 CPUs"),
        ({"gpus_per_worker": -1}, ValueError, "'GPU': -1} of Ray's resources; numbers"),
        ({"resources_per_worker": {"TPU": -4}}, ValueError, "'TPU': -4} of Ray's"),
    ]:
        with pytest.raises(kind) as told:
            RayProcesses(**{"workers": 1, "parameter_servers": 1, **given})
        assert said in str(told.value)
    with pytest.raises(ValueError, match="say how many, as in workers=4, parameter_se"):
        js.ParameterServerStrategy(backend="ray")
    resolver = js.cluster_resolver.SimpleClusterResolver(
        js.cluster_resolver.ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    )
    with pytest.raises(ValueError, match="give no cluster"):
        js.ParameterServerStrategy(resolver, workers=1, backend="ray")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "a:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        js.errors.MissingExtraError, match=r'pip install "jaxstrategy\[ray\]"'
    ):
        js.ParameterServerStrategy(workers=1, parameter_servers=1, backend="ray")


def environment(monkeypatch, **variables):
    monkeypatch.setattr(ray_processes.os, "environ", variables)
    secret = ray_processes.Secret("a secret of many letters")
    return ray_processes._environment(secret, with_modules=False)


def test_workers_have_their_share_of_cpus_or_the_gpus_that_ray_gives(monkeypatch):
    given = environment(
        monkeypatch, JAX_PLATFORMS="cuda", XLA_FLAGS="--x", HOME="/", TF_CONFIG="{}"
    )
    own = ray_processes._of_worker(given, 2.5, 4)
    assert own["JAX_PLATFORMS"] == "cpu" and own["JAX_NUM_CPU_DEVICES"] == "4"
    assert own["PJRT_NPROC"] == "4" and own["OMP_NUM_THREADS"] == "2"
    assert own["XLA_FLAGS"] == "--x" and not {"HOME", "TF_CONFIG"} & set(own)
    assert own["JAXSTRATEGY_CLUSTER_SECRET"] == "a secret of many letters"
    own = ray_processes._of_worker(environment(monkeypatch), 1.0, None)
    assert not {"JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"} & set(own)
    given = environment(monkeypatch, JAX_PLATFORMS="cuda,cpu")
    assert ray_processes._of_worker(given, 1.0, None)["JAX_PLATFORMS"] == "cuda,cpu"
