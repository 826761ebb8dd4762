"""Addresses as sockets want them: `endpoint`, `address_of`."""

from __future__ import annotations

from jaxstrategy.cluster.resolvers._cluster_spec import host_and_port


def endpoint(address: str) -> tuple[str, int]:
    """Host and port as sockets want them; raises as `host_and_port`.

    >>> endpoint("[::1]:80"), endpoint("node7:2222")
    (('::1', 80), ('node7', 2222))
    """
    host, port = host_and_port(address)
    return host.removeprefix("[").removesuffix("]"), port


def address_of(host: str, port: int) -> str:
    """The opposite of `endpoint`.

    >>> address_of("::1", 80), address_of("node7", 2222)
    ('[::1]:80', 'node7:2222')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
