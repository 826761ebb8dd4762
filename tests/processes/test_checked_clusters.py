"""Which clusters can train with parameter servers."""

import pytest

from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    checked_cluster,
    is_for_servers,
)
from jaxstrategy.cluster_resolver import ClusterSpec


def tasks(**counts):
    return ClusterSpec(
        {job: [f"{job}{k}:2222" for k in range(n)] for job, n in counts.items()}
    )


def test_clusters_that_cannot_train_are_refused():
    for spec, task_type, message in [
        (tasks(), None, "Cluster spec must be non-empty"),
        (tasks(worker=1, ps=1, foo=1), None, "Disallowed task type found in"),
        (tasks(worker=1, ps=1), "foobar", "Unrecognized task_type: 'foobar'.* worker,"),
        (tasks(chief=2), None, "at most one 'chief' job"),
        (tasks(worker=1, ps=1, evaluator=2), None, "at most one 'evaluator' job"),
        (tasks(chief=1), None, "There must be at least one ps"),
        (tasks(chief=1, worker=2), None, "needs to have `ps` jobs"),
        (tasks(ps=1, chief=1, evaluator=1), None, "must be at least one worker"),
        (tasks(ps=1, worker=0), None, "must be at least one worker"),
        (ClusterSpec({"ps": ["a:1"], "worker": {1: "b:1"}}), None, r"tasks \[1\] of"),
        (ClusterSpec({"ps": ["a:1"], "worker": ["b"]}), None, "'b' is not an address"),
    ]:
        with pytest.raises(ValueError, match=message):
            checked_cluster(spec, task_type)


def test_chief_and_evaluator_are_none_of_those_who_are_called():
    spec = tasks(chief=1, worker=2, ps=2, evaluator=1)
    for task_type in (None, "chief", "worker", "ps", "evaluator"):
        assert checked_cluster(spec, task_type) == (
            ["worker0:2222", "worker1:2222"],
            ["ps0:2222", "ps1:2222"],
        )
    checked_cluster(tasks(worker=1, ps=1), "chief")  # which need not be in it


def test_clusters_of_replicas_have_no_servers():
    assert is_for_servers(tasks(worker=1, ps=1))
    assert not is_for_servers(tasks(worker=1))
    assert not is_for_servers(tasks(worker=1, ps=0))
