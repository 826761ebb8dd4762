"""The devices of this host, divided among the workers: `ChildDevices`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Self, final

import jax
import jax.export

from jaxstrategy.launch._options import GPUS, visible_gpus
from jaxstrategy.parameter_servers.backends import _child_environment
from jaxstrategy.text._units import with_noun

_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_WHOLE = 0.75  # of a GPU's memory: JAX's own default


@final
@dataclasses.dataclass(frozen=True)
class ChildDevices:
    """Which devices each worker has."""

    platform: str
    count: int
    gpus: tuple[tuple[str, ...], ...] = ()
    sharing: int = 1

    @classmethod
    def found(cls, workers: int, count: int | None) -> Self:
        """Those that JAX has here: GPUs, or else CPU devices that are simulated."""
        backend = jax.default_backend()
        if backend == "cpu":
            return cls("cpu", count or 1)
        if backend != "gpu":
            raise ValueError(
                f"The devices here are of the platform {backend!r}, which processes "
                "cannot divide. Set JAX_PLATFORMS=cpu, or choose backend='threads'."
            )
        names = visible_gpus(os.environ) or list(
            map(str, range(jax.local_device_count()))
        )
        return cls(
            jax.export.default_export_platform(), *divided(names, workers, count)
        )

    def environment(
        self, inherited: Mapping[str, str], worker: int, workers: int
    ) -> dict[str, str]:
        """The environment variables of one worker, of several."""
        threads = _child_environment.threads_of_one(workers)
        if not self.gpus:
            return _child_environment.of_child(inherited, self.count, threads)
        own = _child_environment.of_child(inherited, 1, threads)
        del own["JAX_PLATFORMS"]
        own |= {k: inherited[k] for k in ("JAX_PLATFORMS",) if k in inherited}
        own[GPUS] = ",".join(self.gpus[worker])
        if self.sharing > 1:
            own.setdefault(_MEMORY, f"{_WHOLE / self.sharing:.3f}")
        return own


def divided(
    gpus: Sequence[str], workers: int, count: int | None
) -> tuple[int, tuple[tuple[str, ...], ...], int]:
    """How many GPUs each worker has, which, and how many workers share one.

    Raises:
      ValueError: there are not enough.

    >>> divided("0123", 2, None)
    (2, (('0', '1'), ('2', '3')), 1)
    >>> divided("0", 2, 1)
    (1, (('0',), ('0',)), 2)
    """
    each = count or max(1, len(gpus) // workers)
    if each * workers <= len(gpus):
        parts = (gpus[each * k : each * (k + 1)] for k in range(workers))
        return each, tuple(map(tuple, parts)), 1
    if each == 1:
        shared = tuple((gpus[k % len(gpus)],) for k in range(workers))
        return 1, shared, -(-workers // len(gpus))
    raise ValueError(
        f"{with_noun(workers, 'worker')} with {each} devices each need "
        f"{each * workers} GPUs, and there are {len(gpus)}. Ask for fewer workers or "
        "devices_per_worker, or set JAX_PLATFORMS=cpu to simulate devices."
    )
