"""The secret by which the processes of a job know each other."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from typing import NoReturn, Self, final

from jaxstrategy._src.errors import ClusterError

VARIABLE = "JAXSTRATEGY_CLUSTER_SECRET"
NETWORK = "JAXSTRATEGY_CLUSTER_NETWORK"
_SHORTEST = 16  # characters; attempts can be made without the job, so it is no password
HOW_TO_MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))"'


@final
class Secret:
    """The secret that only the processes of one job know; it does not print.

    It is false if there is none: anybody can then make the same keys.

    Args:
      text: at least 16 characters, or none.

    Raises:
      ValueError: it is too short.

    >>> Secret("correct horse battery staple"), bool(Secret())
    (Secret(hidden), False)
    """

    __slots__ = ("_key",)

    def __init__(self, text: str = "") -> None:
        if text and len(text) < _SHORTEST:
            raise ValueError(
                f"A secret of {len(text)} characters can be guessed; at least "
                f"{_SHORTEST} random ones are wanted. This makes some: "
                f"{HOW_TO_MAKE_ONE}"
            )
        self._key = os.fsencode(text)

    @classmethod
    def random(cls) -> Self:
        """A new one of 256 bits."""
        return cls(secrets.token_hex(32))

    @classmethod
    def of_environment(cls) -> Self:
        """The secret in `JAXSTRATEGY_CLUSTER_SECRET`; an empty one if it is not set."""
        text = os.environ.get(VARIABLE)
        if text is None:
            return cls()
        if not text.strip():
            raise ValueError(
                f"{VARIABLE} is set and empty. Give all processes of the job the same "
                f"random word, or do not set it. This makes one: {HOW_TO_MAKE_ONE}"
            )
        try:
            return cls(text.strip())
        except ValueError as error:
            raise ValueError(f"{VARIABLE} is wrong. {error}") from None

    def key(self, purpose: bytes) -> bytes:
        """A key for one purpose, from which the secret cannot be found."""
        return hmac.digest(self._key, purpose, "sha256")

    def variables(self) -> dict[str, str]:
        """The secret itself, for the environment of a process and nothing else."""
        return {VARIABLE: os.fsdecode(self._key)}

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return "Secret(hidden)" if self else "Secret()"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret is not written anywhere; hand on the environment.")


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can listen or call at an address."""
    try:
        # A name without an address is not taken for safe: it may get any.
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


_ALL_ADDRESSES = ("", "*", "0.0.0.0", "::")


def is_network_trusted() -> bool:
    """Whether the user says that no stranger reaches the network of the job."""
    said = os.environ.get(NETWORK, "")
    if said not in ("", "trusted"):
        raise ValueError(
            f"{NETWORK} is {said!r}. It is `trusted` where nobody but the job's own "
            "processes reaches its network, and otherwise not set."
        )
    return said == "trusted"


def why_refused(secret: Secret, host: str) -> str | None:
    """The reason why processes must not meet there; None if they may."""
    if secret or is_network_trusted() or is_loopback(host):
        return None
    return (
        f"{host} can be reached from other hosts, and the job has no secret: whoever "
        f"reaches the port could take part in it. Set {VARIABLE} to the same random "
        "word for all processes, in their environment and never on a command line "
        f"({HOW_TO_MAKE_ONE} makes one; `python -m jaxstrategy.launch` does so by "
        f"itself on one machine). Or set {NETWORK}=trusted if nobody else reaches that "
        "network"
    )


def check(secret: Secret, host: str) -> None:
    """Nothing if processes may meet there."""
    if why := why_refused(secret, host):
        raise ClusterError(f"The processes do not meet: {why}.")


def check_address(secret: Secret, address: str) -> None:
    """Nothing if the processes of a job may meet at `host:port`."""
    host = address.rpartition(":")[0].strip("[]")
    if host in _ALL_ADDRESSES:
        raise ClusterError(
            f"{address!r} is every address of this host. Give the one at which the "
            "other processes of the job reach it."
        )
    check(secret, host)
