"""`describe`: the devices that a plan counts on, here or elsewhere, by numbers."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, final

import jax

from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text.shown import bytes_of, positive, shown, with_bytes

_NUMBERS = ("memory", "flops", "memory_bandwidth", "bandwidth", "call_seconds")
# Of data sheets, by a part of `device_kind`: bytes; operations a second in products of
# 16-bit matrices; bytes a second of the memory, and one way over the links.
_PUBLISHED = {
    "B200": (180e9, 2250e12, 8e12, 900e9),
    "H200": (141e9, 989e12, 4.8e12, 450e9),
    "H100": (80e9, 989e12, 3.35e12, 450e9),
    "A100": (80e9, 312e12, 2e12, 300e9),
    "V100": (16e9, 125e12, 0.9e12, 150e9),
    "L4": (24e9, 121e12, 0.3e12, 32e9),
    "T4": (16e9, 65e12, 0.3e12, 16e9),
    "TPU v4": (32 * 2**30, 275e12, 1.2e12, 150e9),
    "TPU v5 lite": (16 * 2**30, 197e12, 0.82e12, 100e9),
    "TPU v5": (95 * 2**30, 459e12, 2.76e12, 300e9),
    "TPU v6 lite": (32 * 2**30, 918e12, 1.64e12, 224e9),
}
# Of simulated devices, which share the cores: about what each core does, and all.
_CORE_FLOPS, _CORES_BANDWIDTH, _LINKS_BANDWIDTH = 1e11, 4e10, 1e10


@final
@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices by numbers, for `js.plan`. Made by `planning.describe`.

    Attributes:
      kind: what they are called.
      devices: what XLA compiles for.
      memory: bytes of one device; None where that is not known.
      flops: floating-point operations that one can do in a second.
      memory_bandwidth: bytes that one can read or write in a second.
      topology: the links between them.
      call_seconds: how long the host takes to start a program on all of them.
      is_here: whether they are devices of this process.

    >>> import jaxstrategy as js
    >>> from jaxstrategy import planning
    >>> _ = js.simulate(8)
    >>> planning.describe("A100", count=2).topology.bandwidth
    300000000000.0
    """

    kind: str
    devices: Sequence[Device] = dataclasses.field(repr=False)
    memory: int | None
    flops: float
    memory_bandwidth: float
    topology: Topology
    call_seconds: float
    is_here: bool

    def __post_init__(self) -> None:
        links, count = self.topology, len(self.devices)
        if not isinstance(links, Topology):
            raise TypeError(
                f"`topology` was {shown(links)}; a `js.profiling.Topology` was wanted, "
                "for example what `strategy.measure_links()` returns."
            )
        if links.replicas != count:
            raise ValueError(
                f"`topology` was that of {links.replicas} replicas, but there are "
                f"{count} devices. Give `topology.with_replicas({count})`."
            )

    def __str__(self) -> str:
        of = "" if self.memory is None else f" of {with_bytes(self.memory)}"
        return f"{len(self.devices)} {self.kind}{of}"


def describe(
    what: str | Sequence[Device | str] | None = None,
    *,
    count: int | None = None,
    memory: int | str | None = None,
    flops: float | None = None,
    memory_bandwidth: float | None = None,
    bandwidth: float | None = None,
    call_seconds: float | None = None,
    topology: Topology | None = None,
) -> Machine:
    """Devices by numbers, for `js.plan`: those given, else those of data sheets.

    They are devices of this process, by default all; or a slice of TPUs, as `"v5p-64"`
    or `"v5e:4x8"`, which need not be here, as XLA compiles for it where `libtpu` is
    installed; or GPUs by a `count` and a name, such as `"H100"`, or numbers. XLA cannot
    compile for GPUs that are not here, so that programs are those of as many simulated
    CPU devices (`js.simulate`): the state is right to the byte, what a step needs in
    between is near.

    Args:
      what: devices or names, see above.
      count: how many GPUs.
      memory: of one device, in bytes or as `"80GiB"`.
      flops: floating-point operations that one device can do in a second; published
        ones are those of products of 16-bit matrices, those of CPUs a guess.
      memory_bandwidth: bytes that it can read or write in a second.
      bandwidth: bytes that it can send in a second.
      call_seconds: how long the host takes to start a program on all of them.
      topology: the links in more detail, such as `strategy.measure_links()`.

    Raises:
      ValueError: nothing is known by this name, a number is missing or not positive, or
        there are too few simulated devices.
      TypeError: `count` is no whole number, `memory` no size, `topology` none.
      RuntimeError: `libtpu` is missing, or cannot make such a slice.

    >>> import jaxstrategy as js
    >>> from jaxstrategy import planning
    >>> _ = js.simulate(8)
    >>> print(planning.describe("H100", count=8))
    8 H100 of 74.5 GiB
    """
    size = None if memory is None else bytes_of(memory)
    given = (size, flops, memory_bandwidth, bandwidth, call_seconds)
    told = {x: y for x, y in zip(_NUMBERS, given, strict=True) if y is not None}
    for name, number in told.items():
        if not number > 0:
            raise ValueError(f"`{name}` was {number}; a positive number was wanted.")
    numbers: dict[str, Any] = {"call_seconds": 5e-5}
    kind = name = str(what or "devices")
    if is_here := count is None and not re.match(r"v\d", kind):
        devices = _devices.default_devices() if what is None else _devices.choose(what)
        kind = name = devices[0].device_kind
        each = (os.cpu_count() or 1) * _CORE_FLOPS, _CORES_BANDWIDTH, _LINKS_BANDWIDTH
        guess = (None, *(total / len(devices) for total in each), 3e-4)
        numbers = dict(zip(_NUMBERS, guess, strict=True))
    elif count is None:
        devices = _devices.tpu_slice(kind)
        name = devices[0].device_kind
    elif len(devices := jax.local_devices(backend="cpu")) < positive("count", count):
        raise ValueError(
            f"Programs for {count} GPUs that are not here are compiled for as many "
            f"simulated devices, and there are {len(devices)}. Call "
            f"`js.simulate({count})` before anything uses JAX's devices."
        )
    devices = tuple(devices[:count])
    known = (each for part, each in _PUBLISHED.items() if part in name)
    numbers |= zip(_NUMBERS, next(known, ()), strict=False)
    if is_here and (stats := devices[0].memory_stats()):
        numbers["memory"] = stats.get("bytes_limit", numbers["memory"])
    numbers |= told | ({} if topology is None else {"bandwidth": 1.0})
    if missing := [each for each in _NUMBERS if each not in numbers]:
        raise ValueError(
            f"`{missing[0]}` of {name!r} is not known. Give `memory=`, `flops=`, "
            "`memory_bandwidth=` and `bandwidth=`, or the name of one of "
            f"{', '.join(_PUBLISHED)}."
        )
    links = Topology(numbers.pop("bandwidth"), 1e-5, len(devices))
    links = links if topology is None else topology
    return Machine(kind, devices, topology=links, is_here=is_here, **numbers)
