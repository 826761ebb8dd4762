"""`GCEClusterResolver`: an instance group of Google Compute Engine as a cluster."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from typing import Any, final

from jaxstrategy._src.cluster.resolvers.cloud import (
    BUSY,
    CloudResolver,
    NotYetError,
    checked_seconds,
    request_seconds,
)
from jaxstrategy._src.cluster.resolvers.cluster_resolver import checked_task_id
from jaxstrategy._src.cluster.resolvers.cluster_spec import (
    ClusterSpec,
    address_of,
    checked,
    checked_port,
)
from jaxstrategy._src.errors import ClusterError, MissingExtraError
from jaxstrategy._src.text import shown

_SCOPES = ["https://www.googleapis.com/auth/compute.readonly"]
# The variable by which Google's own clients find another metadata server.
_METADATA_HOST = "GCE_METADATA_HOST"
_OWN_IP = "computeMetadata/v1/instance/network-interfaces/0/ip"
_METADATA_SECONDS = 5.0
_CREDENTIALS = (
    "Give `credentials`, or let the default ones be found: on an instance its service "
    "account, elsewhere `gcloud auth application-default login`."
)
_NAMES = "See the names of project, zone and group; it is a group of one zone."
_ADVICE = {
    400: _NAMES,
    404: _NAMES,
    403: 'The account needs the role "Compute Viewer", and an instance the scope '
    '"compute-ro".',
}


@final
class GCEClusterResolver(CloudResolver):
    """The running instances of an instance group, in the order of their addresses.

    Google is asked anew at each call, but a process stays the task as which it joined a
    job. All instances are tasks of one type; a `UnionResolver` joins groups of several.
    Addresses are ordered as text, as in TensorFlow.

    Args:
      project: of the group.
      zone: of the group.
      instance_group: its name.
      port: at which each task listens.
      task_type: what all instances of the group are.
      task_id: the place of this instance among them. None finds it by the address that
        the instance's metadata server tells, so that all can run the same command.
      rpc_layer: what `master` puts before addresses.
      credentials: of `google.auth`; by default those of the place where this runs.
      service: what `googleapiclient.discovery.build("compute", "v1")` gives, or a
        stand-in; then `credentials` are not used.
      num_tasks: how many instances there will be; the calls wait until so many run. By
        default there are those that run when it is asked.
      timeout_seconds: how long a call waits for Google, and for those instances.

    Raises:
      MissingExtraError: Google's client is needed and not installed.
      ClusterError: there are no credentials.
      ValueError: a port, index or number that is none; an empty name.
      TypeError: a `service` of another kind.

    >>> from types import SimpleNamespace as Some
    >>> def request(answer):
    ...     return Some(execute=lambda: answer)
    >>> def listed(**group):
    ...     names = ["zones/us-east1-d/vm-1", "zones/us-east1-d/vm-2"]
    ...     return request({"items": [{"instance": name} for name in names]})
    >>> def got(instance, **group):
    ...     ip = {"vm-1": "10.0.0.1", "vm-2": "10.0.0.2"}[instance]
    ...     return request({"networkInterfaces": [{"networkIP": ip}]})
    >>> service = Some(  # stands for `googleapiclient.discovery.build("compute", "v1")`
    ...     instanceGroups=lambda: Some(
    ...         listInstances=listed, listInstances_next=lambda **_: None
    ...     ),
    ...     instances=lambda: Some(get=got),
    ... )
    >>> resolver = js.cluster_resolver.GCEClusterResolver(
    ...     "project", "us-east1-d", "group", 8470, task_id=1, service=service
    ... )
    >>> resolver.process()
    Process(index=1, count=2, coordinator='10.0.0.1:8470')
    """

    _packages = "google", "googleapiclient", "httplib2"

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
        *,
        num_tasks: int | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        names = {"project": project, "zone": zone, "instance_group": instance_group}
        for name, given in names.items():
            if not isinstance(given, str) or not given:
                raise ValueError(
                    f"`{name}` was {shown(given)}; the name of a "
                    f"{name.replace('_', ' ')} of Google Compute Engine was wanted."
                )
        self._port = checked_port(port)
        self._job = task_type
        self._task_id = None if task_id is None else checked_task_id(task_id)
        self._rpc_layer = rpc_layer
        wanted = "a whole number from 1 on was wanted, or None for the instances "
        self._num_tasks = (
            None
            if num_tasks is None
            else checked("`num_tasks`", num_tasks, f"{wanted}that run.")
        )
        self._timeout_seconds = checked_seconds(timeout_seconds)
        self._where = {"project": project, "zone": zone}
        self._name = instance_group
        self._group = (
            f"instance group {instance_group!r} in zone {zone!r} of project {project!r}"
        )
        for method in ("instanceGroups", "instances"):
            if service is not None and not callable(getattr(service, method, None)):
                raise TypeError(
                    f"`service` was {shown(service)}, which has no method `{method}`. "
                    'Give what `googleapiclient.discovery.build("compute", "v1")` '
                    "gives, or a stand-in."
                )
        self._is_own_service = service is None
        self._service = service or _service(credentials, self._timeout_seconds)

    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the instances that run now.

        Raises:
          ClusterError: none runs, or not `num_tasks` in time; one has no address;
            Google does not answer, or refuses to.
        """
        return ClusterSpec({self._job: self._answered(self._attempt)})

    @property
    def task_type(self) -> str:
        """The type of all instances of the group, which cannot be set.

        Raises:
          RuntimeError: it is set.
        """
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "You cannot reset the task_type of the GCEClusterResolver after it has "
            f"been created. It is {self._job!r}; make another resolver."
        )

    def _now(self) -> tuple[ClusterSpec, str | None, int | None]:
        # Asked once: between two questions, the instances may be others.
        spec = self.cluster_spec()
        if self._task_id is not None:
            return spec, self._job, self.task_id
        own = address_of(_own_address(), self._port)
        tasks = spec.job_tasks(self._job)
        return spec, self._job, tasks.index(own) if own in tasks else None

    def _how_to_tell(self) -> str:
        return (
            f"This host is none of {self._group}, or its metadata "
            "server does not answer. Give `task_id`."
        )

    def _attempt(self, deadline: float) -> list[str]:
        found, wanted = self._addresses(deadline), self._num_tasks
        if not found and wanted is None:
            raise ClusterError(
                f"No instance of {self._group} runs. Start some; give `num_tasks` to "
                "wait for them."
            )
        if wanted is not None and len(found) < wanted:
            raise NotYetError(
                f"{len(found)} of {wanted} instances of {self._group} run."
            )
        if wanted is not None and len(found) > wanted:
            raise ClusterError(
                f"{len(found)} instances of {self._group} run, and `num_tasks` is "
                f"{wanted}."
            )
        # As text, "10.0.0.10:8470" comes before "10.0.0.9:8470".
        return sorted(address_of(address, self._port) for address in found)

    def _addresses(self, deadline: float) -> list[str]:
        """The internal addresses of the running instances."""
        found = []
        try:
            # Once: the client makes all methods of such an object anew.
            groups = self._service.instanceGroups()
            instances = self._service.instances()
            request = groups.listInstances(
                **self._where,
                instanceGroup=self._name,
                body={"instanceState": "RUNNING"},
                orderBy="name",
            )
            while request is not None:
                response = request.execute()
                for item in response.get("items", []):
                    if time.monotonic() > deadline:
                        raise NotYetError(f"Not all of {self._group} was told in time.")
                    name = item["instance"].rpartition("/")[2]
                    told = instances.get(**self._where, instance=name).execute()
                    interfaces = told.get("networkInterfaces") or [{}]
                    if not (address := interfaces[0].get("networkIP")):
                        raise ClusterError(
                            f"Instance {name!r} of {self._group} has no internal IPv4 "
                            "address. Give its first network interface one."
                        )
                    found.append(address)
                request = groups.listInstances_next(
                    previous_request=request, previous_response=response
                )
        finally:
            if self._is_own_service:
                self._service.close()  # the next request opens another connection
        return found

    def _explanation(self, error: Exception) -> ClusterError:
        status = int(getattr(getattr(error, "resp", None), "status", 0))
        told = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        is_limited = status == 403 and "rateLimitExceeded" in told
        is_unanswered = (
            isinstance(error, OSError)
            or type(error).__module__.startswith("httplib2")
            or bool(getattr(error, "retryable", False))
        )
        if is_limited or status in BUSY or is_unanswered:
            return NotYetError(f"Google Compute Engine did not answer: {told}.")
        advice = _ADVICE.get(status, _CREDENTIALS)
        return ClusterError(
            f"Google Compute Engine does not tell of {self._group}: {told}. {advice}"
        )


def _service(credentials: Any, timeout_seconds: float) -> Any:
    """Google's client, whose requests have a deadline."""
    try:
        import google.auth.credentials
        import google.auth.exceptions
        import google_auth_httplib2
        import httplib2
        from googleapiclient import discovery
    except ImportError as missing:
        raise MissingExtraError(
            "`GCEClusterResolver` needs Google's client, which is not installed. "
            "Install the extra: pip install 'jaxstrategy[gce]'"
        ) from missing
    try:
        if credentials is None or credentials == "default":
            credentials, _ = google.auth.default(scopes=_SCOPES)
    except google.auth.exceptions.GoogleAuthError as error:
        raise ClusterError(
            f"There are no credentials for Google Compute Engine: {error} "
            f"{_CREDENTIALS}"
        ) from error
    if not isinstance(credentials, google.auth.credentials.Credentials):
        raise TypeError(
            f"`credentials` was {shown(credentials)}; credentials of `google.auth` "
            'were wanted, or "default".'
        )
    scoped = google.auth.credentials.with_scopes_if_required(credentials, _SCOPES)
    plain = httplib2.Http(timeout=request_seconds(timeout_seconds))
    http = google_auth_httplib2.AuthorizedHttp(scoped, http=plain)
    return discovery.build("compute", "v1", http=http, static_discovery=True)


def _own_address() -> str:
    """The internal address of the instance on which this runs; empty if it is none."""
    host = os.environ.get(_METADATA_HOST) or "metadata.google.internal"
    request = urllib.request.Request(
        f"http://{host}/{_OWN_IP}", headers={"Metadata-Flavor": "Google"}
    )
    # A proxy would ask from another host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as response:
            return response.read(64).decode("ascii", "replace").strip()
    except (urllib.error.URLError, OSError):
        return ""
