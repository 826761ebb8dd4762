"""The options of `--on ray`, checked before anything is started."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, final

from jaxstrategy.launch import _option_values

ADDRESS = "RAY_ADDRESS"
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
HANDED_ON = ("JAX_", "JAXSTRATEGY_", "XLA_")
"""The beginnings of environment variables that go with processes to other machines."""

_CLIENT = "ray://"
_OPTIONS = {"resources": "resource", "variables": "env"}  # that are repeated


@final
@dataclasses.dataclass(frozen=True)
class RayOptions:
    """What each process takes of a Ray cluster, and which cluster that is.

    Attributes:
      address: of the cluster; None: `RAY_ADDRESS`, or one that is started.
      cpus: CPUs of each process, as Ray counts them.
      resources: other resources of each process, by name.
      placement: one of `PLACEMENTS`.
      working_dir: a folder that is copied to each machine; None: all machines have the
        folder in which the launcher was started.
      variables: names of environment variables that the processes get besides.
      wait: seconds to wait for room.
    """

    address: str | None = None
    cpus: float = 1.0
    resources: tuple[tuple[str, float], ...] = ()
    placement: str = "PACK"
    working_dir: str | None = None
    variables: tuple[str, ...] = ()
    wait: float = 300.0


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--on ray`."""
    add = parser.add_argument_group("with --on ray").add_argument
    add("--ray-address", metavar="HOST:PORT",
        help="the cluster (default: RAY_ADDRESS, or a Ray of this machine that is "
        "started, and ended with the job)")  # fmt: skip
    add("--ray-cpus", type=_option_values.amount, metavar="K",
        help="CPUs of each process, as Ray counts them (default: 1)")  # fmt: skip
    add("--ray-resource", type=_resource, metavar="NAME=K", action="append",
        dest="ray_resources",
        help="another resource of each process; repeatable")  # fmt: skip
    add("--ray-placement", choices=PLACEMENTS,
        help="on few machines (PACK, the default) or many (SPREAD); "
        "STRICT_: on one, or each on another, or not at all")  # fmt: skip
    add("--ray-working-dir", metavar="DIR",
        help="copy this folder to each machine, and run there; without, all machines "
        "need the folder in which the launcher is started")  # fmt: skip
    add("--ray-env", metavar="NAME", action="append", dest="ray_variables",
        help="hand on this environment variable; repeatable (those of JAX, XLA and "
        "jaxstrategy are handed on anyway)")  # fmt: skip
    add("--ray-wait", type=_option_values.seconds, metavar="S",
        help="seconds to wait for room on the cluster (default: 300)")  # fmt: skip


def taken_from(given: dict[str, Any], is_on_ray: bool) -> RayOptions | None:
    """Take the options of Ray out of those that were given.

    Raises:
      ValueError: there are some, and the job is not one for Ray.
    """
    names = [field.name for field in dataclasses.fields(RayOptions)]
    ours = {name: given.pop(f"ray_{name}") for name in names}
    ours = {name: value for name, value in ours.items() if value is not None}
    if is_on_ray:
        for name in ("resources", "variables"):
            ours[name] = tuple(ours.get(name, ()))
        return RayOptions(**ours)
    if ours:
        name = next(iter(ours))
        option = _OPTIONS.get(name, name).replace("_", "-")
        raise ValueError(
            f"--ray-{option} needs --on ray: nothing else would look at it"
        )
    return None


def complaint(ray: RayOptions, gpus: int, environment: Mapping[str, str]) -> str | None:
    """Find what cannot be; None if there is nothing."""
    address = ray.address or environment.get(ADDRESS, "")
    if address.startswith(_CLIENT):
        return (
            f"{address!r} is an address for Ray's client; start the launcher on a "
            "machine of the cluster, and give host:port of its head, or auto"
        )
    if not (ray.cpus or gpus or any(number for _, number in ray.resources)):
        return (
            "--ray-cpus 0 needs GPUs or a --ray-resource, or Ray has nothing to place"
        )
    if ray.working_dir is not None and not os.path.isdir(ray.working_dir):
        return f"--ray-working-dir {ray.working_dir!r} is no folder"
    missing = [name for name in ray.variables if name not in environment]
    if missing:
        return f"--ray-env {missing[0]}: there is no such variable in the environment"
    return None


def _resource(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=K, such as TPU=4")
    return name, _option_values.amount(number)
