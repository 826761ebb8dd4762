"""Devices, simulated ones too, and JAX's persistent compilation cache."""

from __future__ import annotations

import functools
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from jaxstrategy._src import text
from jaxstrategy._src.cluster.resolvers.environment import COMPILATION_CACHE
from jaxstrategy._src.errors import SimulationError
from jaxstrategy._src.text import shown, whole

if TYPE_CHECKING:
    # To type checkers `jax.Device` is a variable of unknown type, which strict ones
    # refuse.
    @runtime_checkable
    class Device(Protocol):
        """A `jax.Device`."""

        @property
        def id(self) -> int: ...
        @property
        def platform(self) -> str: ...
        @property
        def device_kind(self) -> str: ...
        @property
        def process_index(self) -> int: ...
        @property
        def local_hardware_id(self) -> int | None: ...
        @property
        def client(self) -> Any: ...
        def memory_stats(self) -> dict[str, int] | None: ...
else:
    Device = jax.Device

_NAME = re.compile(
    r"^(?:/job:(?P<job>\w+))?(?:/replica:\d+)?(?:/task:(?P<task>\d+))?(?:/device:|/)?"
    r"(?P<kind>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
# JAX's own names for the platforms that TensorFlow's names mean.
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "cuda", "rocm": "rocm", "tpu": "tpu"}


def name(device: Device) -> str:
    """The short name of a device, such as `cpu:3`."""
    return f"{device.platform}:{device.id}"


def names(devices: Sequence[Device]) -> str:
    """Device names on one line, each once, shortened to `cpu:0..7` if they run on."""
    devices = list(dict.fromkeys(devices))
    ids = [device.id for device in devices]
    kinds = {device.platform for device in devices}
    consecutive = ids == list(range(ids[0], ids[0] + len(ids)))
    if len(ids) > 2 and len(kinds) == 1 and consecutive:
        return f"{kinds.pop()}:{ids[0]}..{ids[-1]}"
    return ", ".join(map(name, devices))


def find(device: Device | str) -> Device:
    """The device of this host that `device` names.

    Accepts a `jax.Device` and TensorFlow's spellings: `"CPU:0"`, `"GPU:1"`,
    `"/gpu:0"`, `"cuda:0"`, `"/device:CPU:0"`, `"/job:localhost/.../device:GPU:0"`.
    """
    if isinstance(device, Device):
        if device.process_index != jax.process_index():
            raise ValueError(
                f"{device} belongs to process {device.process_index}, this is process "
                f"{jax.process_index()}. Give devices of this host "
                "(`jax.local_devices()`)."
            )
        return device
    if not isinstance(device, str):
        raise TypeError(
            f"A device was expected, got {device!r}. Use an entry of `jax.devices()` "
            'or a name such as "GPU:0".'
        )
    match = _NAME.match(device.strip())
    platform = _PLATFORMS.get(match["kind"].lower()) if match else None
    if match is None or platform is None:
        raise ValueError(
            f"{device!r} is not the name of a device. "
            'Names look like "CPU:0", "GPU:1", "/gpu:0", "cuda:0" or "TPU:0".'
        )
    chosen = _of_platform(platform)
    index = int(match["index"] or 0)
    if index >= len(chosen):
        known = names(chosen) if chosen else f"no {platform} device"
        advice = " `jaxstrategy.simulate(n)` gives a process n CPU devices."
        raise ValueError(
            f"Unknown device {device!r}: this host has {known}."
            f"{advice if platform == 'cpu' else ''}"
        )
    return chosen[index]


def task_of(name: str) -> tuple[str, int] | None:
    """The job and the task number in a device name, if there are any."""
    match = _NAME.match(name.strip())
    if match is None or match["job"] is None:
        return None
    return match["job"].lower(), int(match["task"] or 0)


def default_devices() -> tuple[Device, ...]:
    """All accelerators of this host, or all its CPU devices where there is none."""
    return tuple(jax.local_devices())


def choose(devices: Sequence[Device | str] | Device | str) -> tuple[Device, ...]:
    """The devices that `devices` names, checked to be usable together.

    The name of a platform by itself (`"cpu"`, `"GPU"`) means all its devices on this
    host, as in `jax.devices("gpu")`. In a list, where each entry is one device, it is
    the platform's first one, as in TensorFlow.
    """
    if isinstance(devices, str):
        match, first = _NAME.match(devices.strip()), find(devices)
        is_platform = match is not None and match["index"] is None
        devices = _of_platform(first.platform) if is_platform else [first]
    elif isinstance(devices, Device):
        devices = [devices]
    if not isinstance(devices, Iterable):
        raise TypeError(_no_devices(devices))
    chosen = tuple(find(device) for device in devices)
    if not chosen:
        raise ValueError(
            "An empty list of devices was given. Leave `devices` out to use all "
            "devices of this host, or name at least one."
        )
    repeated = sorted({name(d) for d in chosen if chosen.count(d) > 1})
    if repeated:
        raise ValueError(
            f"No duplicates are allowed in `devices`: {', '.join(repeated)} is there "
            "more than once. Give every device once; with `replicas_per_device` "
            "several replicas share each of them."
        )
    platforms = sorted({device.platform for device in chosen})
    if len(platforms) > 1:
        raise ValueError(
            f"`devices` mixes the platforms {' and '.join(platforms)}. One compiled "
            "program runs on all replicas: give devices of one platform."
        )
    return chosen


def _no_devices(value: Any) -> str:
    if isinstance(value, Mesh):
        advice = (
            "A strategy makes a mesh of its own: give the devices, "
            "`list(mesh.devices.flat)`"
        )
    elif whole(value) is not None:
        advice = (
            f"Give the devices themselves: `jax.devices()[:{value}]`, or on a computer "
            f"without accelerators `jaxstrategy.simulate({value})`"
        )
    else:
        advice = "Give entries of `jax.devices()`, or leave it out to use all"
    return (
        f"`devices` was {value!r}; a list of devices, or of their names such as "
        f'"GPU:0", was wanted. {advice}.'
    )


def simulate(n: int) -> tuple[Device, ...]:
    """`n` simulated CPU devices in this process, for tests, notebooks and laptops.

    Call it once, before the first array is made. Calling it again with the same `n`
    (a notebook cell that is run twice) changes nothing. JAX then uses the CPU even
    where the machine has an accelerator.

    Returns:
      The devices, ready for `MirroredStrategy(devices)`, which also is what
      `MirroredStrategy()` takes.

    Raises:
      ValueError: `n` is not a positive whole number.
      SimulationError: JAX has already started its devices, or an environment
        variable overrules the number.

    >>> len(simulate(8))
    8
    """
    count = whole(n)
    if count is None or count < 1:
        raise ValueError(
            f"`simulate` was given {n!r}; a positive whole number was wanted."
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        cause = error
    else:
        cause = None
        jax.config.update("jax_platforms", "cpu")
    chosen = tuple(jax.local_devices(backend="cpu"))
    if len(chosen) != count or jax.default_backend() != "cpu":
        raise SimulationError(
            _too_late(count, chosen, started=cause is not None)
        ) from cause
    return chosen


def _too_late(n: int, chosen: Sequence[Device], started: bool) -> str:
    if not started:
        return (
            f"{n} simulated CPU devices were asked for, JAX made {len(chosen)}. Unset "
            "the environment variables JAX_NUM_CPU_DEVICES and XLA_FLAGS, which "
            "overrule `simulate`, and start Python again."
        )
    return (
        f"`simulate({n})` came too late: JAX has already started, on "
        f"{names(jax.local_devices())}. Restart Python (in a notebook: the kernel) and "
        f"call `simulate({n})` before the first array, `jax.devices()` or strategy."
    )


def _of_platform(platform: str) -> list[Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX's word for "no such platform here"
        return []


# By default JAX keeps what took a second to compile, above a size that depends on the
# file system; 0 stands for that size, and -1 means everything (0.10 and 0.12).
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def compilation_cache(directory: str | os.PathLike[str] | None) -> str | None:
    """Keeps what XLA compiles in a folder, where later processes find it.

    The first call of a step in a process that is started again then traces the step and
    reads its program, instead of compiling it. All programs are kept, however fast they
    were compiled; call it before the first step. JAX finds a program by what it
    computes, the devices, the versions and the options of XLA. The processes of a job
    use one folder: process 0 writes it. On CPUs JAX's key of a program differs between
    processes, so that the others compile still (JAX 0.10 and 0.12); steps that are
    saved by `strategy.compile` are each process's own. Nothing is ever removed from the
    folder, and whoever can write there decides what the processes run.

    `python -m jaxstrategy.launch --compilation-cache DIR` does so in each process of a
    job and each restart, and so does the variable `JAXSTRATEGY_COMPILATION_CACHE` of
    the environment when a strategy is made.

    Args:
      directory: where; it is made if need be, for this user alone. It may be an address
        of what JAX can write besides, such as `gs://bucket/folder`. None turns the
        cache off.

    Returns:
      The folder's path; None if the cache is off. A folder that cannot be written, or
      that everybody can write, is a `RuntimeWarning`, and the cache is off.

    Raises:
      TypeError: `directory` is no path.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     js.experimental.compilation_cache(folder) == folder
    True
    >>> js.experimental.compilation_cache(None)
    """
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"`compilation_cache` was given {shown(directory)}; the path of a folder "
            "was wanted, or None for no cache."
        )
    path = None if directory is None else os.fspath(directory)
    if path is not None and "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
        if (why := _why_refused(path)) is not None:
            text.warn(
                f"There is no compilation cache in {path!r}: {why}. Every process "
                "compiles its programs itself. Give a folder that this user alone, or "
                "its group, can write.",
                RuntimeWarning,
            )
            path = None
    if jax.config.jax_compilation_cache_dir != path:
        from jax.experimental.compilation_cache import compilation_cache as jax_cache

        # JAX goes on with the first folder that it has used.
        jax_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", path)
    if path is not None:
        for name, value in _KEEP_ALL.items():
            jax.config.update(name, value)
    return path


@functools.cache
def set_up_by_environment() -> None:
    """Uses the compilation cache that the environment names, if it names one."""
    if directory := os.environ.get(COMPILATION_CACHE):
        compilation_cache(directory)


def _why_refused(path: str) -> str | None:
    """Makes the folder if need be; returns why it cannot be used, if it cannot."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"it cannot be written ({error.strerror or error})"
    if hasattr(os, "getuid") and mode & stat.S_IWOTH:
        return "everybody can write it, and a program that is found there is run"
    return None


def tpu_slice(name: str) -> Sequence[Any]:
    """The devices of a slice of TPUs, here or not, to compile for."""
    from jax.experimental import topologies

    match = re.fullmatch(r"(v\d+)(litepod|e|p)?(?::([\dx]+)|-(\d+))", name)
    if match is None:
        raise ValueError(
            f"`describe` was given {name!r}; a slice of TPUs is written as "
            '"v5p-64" or "v5e:4x8".'
        )
    kind = f"{match[1]}{match[2] or ''}".replace("litepod", "e")
    # Planes are counted in chips, the others in cores, two for each chip.
    sides = [1, 1] if kind.endswith("e") else [1, 1, 1]
    while match[4] and math.prod(sides) < int(match[4]) // (len(sides) - 1):
        sides[sides.index(min(sides))] *= 2
    sides.sort(reverse=sides == [2, 2, 1])
    # Otherwise it asks the metadata server of a cloud, for minutes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        shape = match[3] or "x".join(map(str, sides))
        return topologies.get_topology_desc(f"{kind}:{shape}", "tpu").devices
    except Exception as error:  # of several classes, by what is missing
        raise RuntimeError(
            f"XLA cannot compile for {name!r} here: {' '.join(str(error).split())}\n"
            "Install the `libtpu` of this version of JAX (`pip install 'jax[tpu]'`), "
            "which needs no TPU, and give a slice that there is."
        ) from error
