"""How Kubernetes is asked for pods: `PodClient`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, final

from jaxstrategy._errors import ClusterError, MissingExtraError
from jaxstrategy.cluster.resolvers._attempts import (
    BUSY,
    NotYetError,
    request_seconds,
)
from jaxstrategy.cluster.resolvers._kubernetes_location import (
    KubernetesExecutableLocation,
)
from jaxstrategy.cluster.resolvers._pod import Pod
from jaxstrategy.text._shown import shown

_TOKEN = (
    "The token was not taken: in a pod that of its service account, elsewhere that of "
    "the kubeconfig. `kubectl auth whoami` tells whose it is."
)

Pods: TypeAlias = Callable[[str, float], list[Pod]]
"""The pods with a label, and how many seconds it may take to list them."""


class PodLists(Protocol):
    """What is used of `kubernetes.client.CoreV1Api`."""

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:
        """An object whose `items` are the pods with that label."""


@final
class PodClient:
    """Lists pods, by the user's own client or by one for where the program runs.

    Args:
      override_client: the user's own.
      location: where the program runs.
      namespace: of the pods; None for those of all namespaces.

    Raises:
      MissingExtraError: the client of Kubernetes is needed and not installed.
      ClusterError: nothing says how to reach Kubernetes from there.
      TypeError: `override_client` cannot list pods.
    """

    def __init__(
        self,
        override_client: PodLists | None,
        location: KubernetesExecutableLocation,
        namespace: str | None,
    ) -> None:
        self._method = "list_pod_for_all_namespaces"
        self._where: dict[str, str] = {}
        if namespace is not None:
            self._method = "list_namespaced_pod"
            self._where = {"namespace": namespace}
        self._given = override_client
        self._configuration = None
        if override_client is None:
            self._configuration = _configuration(location)
        elif not callable(getattr(override_client, self._method, None)):
            raise TypeError(
                f"`override_client` was {shown(override_client)}, which has no method "
                f"`{self._method}`. Give a `CoreV1Api` of Kubernetes, or a stand-in."
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[Pods]:
        """A function that lists pods, over a connection that is closed at the end.

        It raises:
          NotYetError: Kubernetes does not answer, or has too much to do.
          ClusterError: it refuses to tell.
        """
        if self._given is not None:
            yield self._lister(self._given)
            return
        import kubernetes.client

        with kubernetes.client.ApiClient(self._configuration) as connection:
            yield self._lister(kubernetes.client.CoreV1Api(connection))

    def _lister(self, client: PodLists) -> Pods:
        ask = getattr(client, self._method)
        has_deadline = _takes(ask, "_request_timeout")

        def pods(label_selector: str, seconds: float) -> list[Pod]:
            arguments: dict[str, Any] = {
                **self._where,
                "label_selector": label_selector,
            }
            if has_deadline:
                # Of connecting and of reading: version 29 does not look at a float.
                arguments["_request_timeout"] = (request_seconds(seconds),) * 2
            with self._explained():
                return [Pod.of(listed) for listed in ask(**arguments).items]

        return pods

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Makes errors of the client say what to do."""
        try:
            yield
        except ClusterError:
            raise
        except Exception as error:
            if not _is_of_client(error):
                raise
            raise self._explanation(error) from error

    def _explanation(self, error: Exception) -> ClusterError:
        status = getattr(error, "status", None)
        if not status or status in BUSY:  # no status: there was no answer at all
            host = getattr(self._configuration, "host", "")
            place = f" at {host}" if host else ""
            return NotYetError(
                f"The API of Kubernetes{place} did not answer: {_told(error)}."
            )
        advice = {401: f" {_TOKEN}", 403: f" {self._needed_right()}"}.get(status, "")
        return ClusterError(
            f"Kubernetes does not let this program list pods: {_told(error)}.{advice}"
        )

    def _needed_right(self) -> str:
        if self._where:
            return (
                "Give its account (in a pod, the service account) a Role with the verb "
                f'"list" for "pods" in the namespace {self._where["namespace"]!r}.'
            )
        return (
            "Give its account (in a pod, the service account) a ClusterRole with the "
            'verb "list" for "pods"; or name the `namespace` of the pods, in which a '
            "Role with that verb is enough."
        )


def _configuration(location: KubernetesExecutableLocation) -> Any:
    """How to reach Kubernetes; that of other clients in this program stays as it is."""
    try:
        import kubernetes.client
        import kubernetes.config
        import yaml  # a part of that client
    except ImportError as missing:
        raise MissingExtraError(
            "`KubernetesClusterResolver` needs the client of Kubernetes, which is not "
            "installed. Install the extra: pip install 'jaxstrategy[kubernetes]'"
        ) from missing
    configuration = kubernetes.client.Configuration()
    configuration.retries = False  # the resolver tries again itself, with a deadline
    is_within = location is KubernetesExecutableLocation.WITHIN_CLUSTER
    try:
        if is_within:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        else:
            kubernetes.config.load_kube_config(client_configuration=configuration)
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError) as error:
        raise ClusterError(_unreachable(is_within, error)) from error
    return configuration


def _unreachable(is_within: bool, error: Exception) -> str:
    if is_within:
        return (
            f"This program does not run in a pod with a service account: {error} "
            "Elsewhere, give `executable_location=KubernetesExecutableLocation."
            "OFF_CLUSTER`, which reads the kubeconfig."
        )
    return (
        f"The kubeconfig cannot be used: {error} `kubectl get pods` should work here; "
        "in a pod, leave out `executable_location`."
    )


def _told(error: Exception) -> str:
    """What an error of the client says, on one line."""
    reason = getattr(error, "reason", None)
    if not isinstance(reason, str):
        return shown(error)
    status = getattr(error, "status", None) or ""
    return " ".join(f"{status} {reason}".split())


def _is_of_client(error: Exception) -> bool:
    """Whether it is an error of Kubernetes' client, or of the HTTP beneath it."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(kinds & {"kubernetes", "urllib3"}) or isinstance(error, OSError)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of that name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        each.name == name or each.kind == each.VAR_KEYWORD for each in parameters
    )
