"""Processes that resolvers tell who they are train together."""

import contextlib
import os
import pathlib

import harness
import pytest
import workers
from helpers.http_answers import served
from helpers.kubernetes_pods import Pods, pod, service_account

TESTS = pathlib.Path(__file__).parent.parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([workers.PATH, str(TESTS)])}


def started(what):
    return f"from workers.resolved import {what}\n{what}()\n"


def check(running):
    assert running.wait(120) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()


@pytest.mark.parametrize(
    "what", ["from_torchrun", pytest.param("from_jax", marks=pytest.mark.slow)]
)
def test_processes_whose_variables_tell_all_train_together(job, what):
    with job(started(what), count=2, env=ENVIRONMENT, started=False) as running:
        check(running)


@pytest.fixture
def kubernetes(tmp_path):
    """Starts the API for some pods, and tells the environment in which they find it."""
    token, certificate, context = service_account(tmp_path)

    @contextlib.contextmanager
    def kubernetes(pods):
        with served(Pods(pods), context) as api:
            host, port = api.address.split(":")
            yield (
                api,
                {
                    **ENVIRONMENT,
                    "TOKEN": str(token),
                    "CERTIFICATE": str(certificate),
                    "KUBERNETES_SERVICE_HOST": host,
                    "KUBERNETES_SERVICE_PORT": port,
                },
            )

    return kubernetes


@pytest.mark.slow
def test_pods_of_kubernetes_train_together(job, kubernetes):
    pods = [pod(f"train-{i}", f"127.0.0.{i + 1}") for i in range(2)]
    with kubernetes(pods[:1]) as (api, env):
        script = started("from_kubernetes")
        with job(script, count=2, seconds=60, env=env, started=False) as running:
            harness.until(lambda: api.asked, seconds=60)
            api.pods = pods  # the second comes when the first has asked
            check(running)


@pytest.mark.slow
def test_pods_without_a_service_account_train_together(job):
    # In a pod, JAX asks Kubernetes for what it knows already.
    kubernetes = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": "1",
    }
    script, env = started("from_tf_config"), {**ENVIRONMENT, **kubernetes}
    with job(script, count=2, seconds=60, env=env, started=False) as running:
        check(running)
    for rank in running.ranks:
        assert (
            "runs in a pod of Kubernetes, and JAX could not ask there for the other "
            "processes: Service token file does not exist. Say which processes"
        ) in rank.output
