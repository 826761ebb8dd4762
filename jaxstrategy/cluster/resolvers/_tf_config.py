"""`TFConfigClusterResolver`: the environment variable `TF_CONFIG`."""

from __future__ import annotations

import json
import os
from typing import Any, TypeAlias, final

from jaxstrategy.cluster.resolvers._cluster_resolver import (
    ClusterResolver,
    Process,
)
from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec, task_index

VARIABLE = "TF_CONFIG"
Json: TypeAlias = Any  # of the environment: looked at where it is used
_EXAMPLE = (
    '{"cluster": {"worker": ["a:2222", "b:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@final
class TFConfigClusterResolver(ClusterResolver):
    """Reads `TF_CONFIG`, the JSON that TensorFlow's clusters set for every process.

    It is read anew at each call:

        {"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
         "task": {"type": "worker", "index": 0}}

    Args:
      task_type: instead of the task's `type`.
      task_id: instead of the task's `index`.
      rpc_layer: instead of the `rpc_layer` there.
      environment: what `environment` gives.

    All methods raise ValueError, and quote what is wrong, if `TF_CONFIG` is malformed.

    >>> import json, os
    >>> os.environ["TF_CONFIG"] = json.dumps({
    ...     "cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
    ...     "task": {"type": "worker", "index": 1},
    ... })
    >>> js.cluster_resolver.TFConfigClusterResolver().process()
    Process(index=2, count=3, coordinator='a:2222')
    >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """The cluster of `TF_CONFIG`, without jobs if there is none.

        Raises:
          ValueError: `TF_CONFIG` is malformed; the message quotes what is wrong.
        """
        cluster = _part(_config(), "cluster")
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise ValueError(f'"cluster" of {VARIABLE} is wrong. {error}') from error

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The `session_master` of `TF_CONFIG` if there is one, else a task's address.

        Without arguments that of this process; empty if it is the only task.

        Raises:
          ValueError: there is no such task, or this process's task is not known.
        """
        session_master = _config().get("session_master")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        task_type, task_id = self._completed(task_type, task_id)
        if task_type is None or task_id is None:
            raise ValueError(f'{VARIABLE} has no "task". {_wanted()}')
        return self._url_of(task_type, task_id, rpc_layer)

    def process(self) -> Process:
        """As in `ClusterResolver`, from `TF_CONFIG`.

        Raises:
          ValueError: `TF_CONFIG` is malformed, or the cluster or the task is not one
            that can train; the message quotes what is wrong.
        """
        try:
            return super().process()
        except ValueError as error:
            raise ValueError(
                f"{error} {VARIABLE} is {os.environ.get(VARIABLE, '')}"
            ) from error

    def _found_task_type(self) -> str | None:
        found = _part(_config(), "task").get("type")
        if found is None or isinstance(found, (str, int)):
            return None if found is None else str(found)
        raise ValueError(f'"type" of {VARIABLE}\'s task is {found!r}. {_wanted()}')

    def _found_task_id(self) -> int | None:
        found = _part(_config(), "task").get("index")
        return None if found is None else _index(found)

    def _as_task_type(self, given: str) -> str:
        return str(given)  # a number is text, as in TensorFlow

    def _as_task_id(self, given: int) -> int:
        return _index(given)

    def _found_rpc_layer(self) -> str | None:
        return _config().get("rpc_layer")

    def _accelerators(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        if task_type is None and task_id is None:
            return super()._accelerators(None, None)
        return super()._accelerators(*self._completed(task_type, task_id))


def tells_of_cluster() -> bool:
    """Whether `TF_CONFIG` has a cluster or a task.

    Raises:
      ValueError: it is malformed.
    """
    config = _config()
    return bool(config.get("cluster") or config.get("task"))


def _config() -> dict[str, Json]:
    text = os.environ.get(VARIABLE, "").strip() or "{}"
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{VARIABLE} is not JSON ({error}): {text} {_wanted()}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{VARIABLE} is {text}, which is no object. {_wanted()}")
    for key in ("session_master", "rpc_layer"):
        if not isinstance(config.get(key), str | None):
            raise ValueError(
                f'"{key}" of {VARIABLE} is {config[key]!r}; it is a string.'
            )
    return config


def _part(config: dict[str, Json], key: str) -> dict[str, Json]:
    part = config.get(key)
    if part is not None and not isinstance(part, dict):
        raise ValueError(f'"{key}" of {VARIABLE} is {json.dumps(part)}. {_wanted()}')
    return part or {}


def _index(index: object) -> int:
    found = task_index(index)
    if found is not None:
        return found
    raise ValueError(
        f"The index of {VARIABLE}'s task is {index!r}; it is a whole number from 0 on. "
        + _wanted()
    )


def _wanted() -> str:
    return f"It looks like {_EXAMPLE}."
