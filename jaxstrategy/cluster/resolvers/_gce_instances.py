"""The instances of a group of Google Compute Engine: `GCEInstances`."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, final

from jaxstrategy._errors import ClusterError, MissingExtraError
from jaxstrategy.cluster.resolvers._attempts import (
    BUSY,
    NotYetError,
    request_seconds,
)
from jaxstrategy.text._shown import shown

_SCOPES = ["https://www.googleapis.com/auth/compute.readonly"]
# The variable by which Google's own clients find another metadata server.
_METADATA_HOST = "GCE_METADATA_HOST"
_OWN_IP = "computeMetadata/v1/instance/network-interfaces/0/ip"
_METADATA_SECONDS = 5.0
_CREDENTIALS = (
    "Give `credentials`, or let the default ones be found: on an instance its service "
    "account, elsewhere `gcloud auth application-default login`."
)


@final
class GCEInstances:
    """Asks for the internal addresses of the running instances of a group.

    Args:
      project: of the group.
      zone: of the group.
      group: its name.
      credentials: of Google; `"default"` or None for those of the place where the
        program runs.
      service: what `googleapiclient.discovery.build("compute", "v1")` gives, or a
        stand-in; by default one is built with the credentials.
      timeout_seconds: how long a request may take.

    Raises:
      MissingExtraError: Google's client is needed and not installed.
      ClusterError: there are no credentials.
      TypeError: `service` is no such object.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        group: str,
        credentials: Any,
        service: Any,
        timeout_seconds: float,
    ) -> None:
        self._where = {"project": project, "zone": zone}
        self._group = group
        self._is_own = service is None
        for method in ("instanceGroups", "instances"):
            if service is not None and not callable(getattr(service, method, None)):
                raise TypeError(
                    f"`service` was {shown(service)}, which has no method `{method}`. "
                    'Give what `googleapiclient.discovery.build("compute", "v1")` '
                    "gives, or a stand-in."
                )
        if service is None:
            service = _service(credentials, timeout_seconds)
        self._service = service

    @property
    def description(self) -> str:
        """The group in words."""
        project, zone = self._where["project"], self._where["zone"]
        return f"instance group {self._group!r} in zone {zone!r} of project {project!r}"

    def addresses(self, deadline: float) -> list[str]:
        """The internal addresses of the running instances.

        Args:
          deadline: of `time.monotonic()`.

        Raises:
          NotYetError: Google does not answer, has too much to do, or takes too long.
          ClusterError: it refuses to tell, or an instance has no such address.
        """
        with self._explained():
            # Once: the client makes all methods of such an object anew.
            instances = self._service.instances()
            return [self._address(instances, name) for name in self._names(deadline)]

    def _names(self, deadline: float) -> Iterator[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._where,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            response = request.execute()
            for item in response.get("items", []):
                if time.monotonic() > deadline:
                    raise NotYetError(
                        f"Not all of {self.description} was told in time."
                    )
                yield item["instance"].rpartition("/")[2]
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )

    def _address(self, instances: Any, name: str) -> str:
        found = instances.get(**self._where, instance=name).execute()
        interfaces = found.get("networkInterfaces") or [{}]
        address = interfaces[0].get("networkIP")
        if not address:
            raise ClusterError(
                f"Instance {name!r} of {self.description} has no internal IPv4 "
                "address. Give its first network interface one."
            )
        return address

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Makes errors of Google's client say what to do."""
        try:
            yield
        except ClusterError:
            raise
        except Exception as error:
            if not _is_of_client(error):
                raise
            raise self._explanation(error) from error
        finally:
            if self._is_own:
                self._service.close()  # the next request opens another connection

    def _explanation(self, error: Exception) -> ClusterError:
        status = getattr(getattr(error, "resp", None), "status", None)
        told = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        is_limited = status == 403 and "rateLimitExceeded" in told
        if is_limited or status in BUSY or _is_unanswered(error):
            return NotYetError(f"Google Compute Engine did not answer: {told}.")
        return ClusterError(
            f"Google Compute Engine does not tell of {self.description}: {told}. "
            f"{_advice(status)}"
        )


def _advice(status: int | None) -> str:
    if status == 403:
        return (
            'The account needs the role "Compute Viewer", and an instance the scope '
            '"compute-ro".'
        )
    if status in (400, 404):
        return "See the names of project, zone and group; it is a group of one zone."
    return _CREDENTIALS


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


def own_address() -> str:
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


def _is_of_client(error: Exception) -> bool:
    """Whether it is an error of Google's client, or of the HTTP beneath it."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(
        kinds & {"google", "googleapiclient", "httplib2"}
    )


def _is_unanswered(error: Exception) -> bool:
    """Whether nobody answered, which may be others the next time."""
    kind = type(error)
    return (
        isinstance(error, OSError)
        or kind.__module__.startswith("httplib2")
        or bool(getattr(error, "retryable", False))
    )
