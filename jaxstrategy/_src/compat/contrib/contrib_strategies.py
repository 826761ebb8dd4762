"""The strategies of `tf.contrib.distribute`, each over one of today."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self, final

from jaxstrategy._src.cluster.resolvers.tpu import TPUClusterResolver
from jaxstrategy._src.compat.adapters import first_named
from jaxstrategy._src.compat.contrib.distribution_strategy import (
    ADAPTERS,
    DistributionStrategy,
    MapOutput,
    operation_of,
    require_cross_tower,
)
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.reductions.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
)
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import (
    between_graph,
    current,
    mirrored,
    multi_worker,
    tpu,
)
from jaxstrategy._src.strategies.destinations import checked_pairs
from jaxstrategy._src.text.shown import whole
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.variables.variable import Variable

_KINDS = {
    "nccl": NcclAllReduce,
    "hierarchical_copy": HierarchicalCopyAllReduce,
}


def AllReduceCrossTowerOps(  # noqa: N802 - a class in TensorFlow
    all_reduce_alg: str = "nccl",
    num_packs: int = 1,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
) -> CrossDeviceOps:
    """All-reduces of the values of all towers.

    Args:
      all_reduce_alg: "nccl", or "hierarchical_copy" for sums inside groups of near
        devices first.
      num_packs: in how many packs arrays of one dtype are joined; 0 for none.
      agg_small_grads_max_bytes: changes nothing, as packs join small arrays.
      agg_small_grads_max_group: likewise.

    Returns:
      Today's `NcclAllReduce` or `HierarchicalCopyAllReduce`.

    Raises:
      ValueError: another algorithm; a negative number.
      TypeError: no whole number.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> ops = contrib.AllReduceCrossTowerOps("hierarchical_copy")
    >>> contrib.MirroredStrategy(js.simulate(8)[:4], cross_tower_ops=ops).num_towers
    4
    """
    if all_reduce_alg not in _KINDS:
        raise ValueError(
            f"`all_reduce_alg` was {all_reduce_alg!r}; 'nccl' or 'hierarchical_copy' "
            "was wanted."
        )
    for name, given in (
        ("num_packs", num_packs),
        ("agg_small_grads_max_bytes", agg_small_grads_max_bytes),
        ("agg_small_grads_max_group", agg_small_grads_max_group),
    ):
        if whole(given) is None:
            raise TypeError(f"`{name}` was {given!r}; a whole number was wanted.")
    return _KINDS[all_reduce_alg](num_packs)


@final
@ADAPTERS.of_type(mirrored.MirroredStrategy)
class MirroredStrategy(DistributionStrategy):
    """One tower per device of this host; variables are mirrored on all of them.

    Args:
      devices: devices or their names, in tower order; by default all accelerators, or
        all CPU devices where there is none.
      num_gpus: how many of those to take, instead of `devices`.
      cross_tower_ops: how values are reduced over the towers.
      prefetch_on_device: whether `distribute_dataset` reads ahead; by default it does.
      num_gpus_per_worker: another name of `num_gpus`.

    Raises:
      ValueError: both devices and a number; no such device; fewer devices than asked
        for.
      TypeError: something else than devices, numbers or operations.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> contrib.MirroredStrategy(num_gpus=2).worker_devices
    [CpuDevice(id=0), CpuDevice(id=1)]
    """

    # Also of one that is made anew for its strategy.
    prefetch_on_device: bool | None = None

    def __init__(
        self,
        devices: Sequence[Device | str] | None = None,
        num_gpus: int | None = None,
        cross_tower_ops: CrossDeviceOps | None = None,
        prefetch_on_device: bool | None = None,
        *,
        num_gpus_per_worker: int | None = None,
    ) -> None:
        if num_gpus is not None and num_gpus_per_worker is not None:
            raise ValueError(
                "Must only specify one of `num_gpus` and `num_gpus_per_worker`."
            )
        number = num_gpus_per_worker if num_gpus is None else num_gpus
        if devices is not None and number is not None:
            raise ValueError("Must only specify one of `devices` and `num_gpus`.")
        chosen = devices if number is None else _first(number, "num_gpus")
        super().__init__(mirrored.MirroredStrategy(chosen, cross_tower_ops))
        self.prefetch_on_device = prefetch_on_device


@final
@ADAPTERS.of_type(mirrored.OneDeviceStrategy)
class OneDeviceStrategy(DistributionStrategy):
    """One tower on one device; values are never wrapped.

    Args:
      device: a device or its name.
      prefetch_on_device: whether `distribute_dataset` reads ahead; by default it does.

    Raises:
      ValueError: this host has no such device.
      TypeError: something else than a device or a name.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> contrib.OneDeviceStrategy("CPU:1").is_single_tower
    True
    """

    prefetch_on_device: bool | None = None

    def __init__(
        self, device: Device | str, prefetch_on_device: bool | None = None
    ) -> None:
        super().__init__(mirrored.OneDeviceStrategy(device))
        self.prefetch_on_device = prefetch_on_device


@final
@ADAPTERS.of_type(multi_worker.MultiWorkerMirroredStrategy)
class CollectiveAllReduceStrategy(DistributionStrategy):
    """One tower per device of every process; today's `MultiWorkerMirroredStrategy`.

    Args:
      num_gpus_per_worker: the number of devices that each process has. It is only
        checked: which devices JAX finds is said when the process is started
        (`CUDA_VISIBLE_DEVICES`). 0, as by default, means all.

    Raises:
      ClusterError: the processes could not start together.
      ValueError: another number of devices was found; the cluster makes no sense.
      TypeError: no whole number.

    >>> import json, os
    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> cluster = {"worker": ["localhost:2222"]}
    >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster})
    >>> contrib.CollectiveAllReduceStrategy().num_towers
    8
    >>> del os.environ["TF_CONFIG"]
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        number = _checked(num_gpus_per_worker, "num_gpus_per_worker", at_least=0)
        # Before JAX looks for devices, the processes must have met.
        strategy = multi_worker.MultiWorkerMirroredStrategy()
        _check_all(number)
        super().__init__(strategy)


@final
@ADAPTERS.of_type(between_graph.BetweenGraphStrategy, mirrored.CentralStorageStrategy)
class ParameterServerStrategy(DistributionStrategy):
    """Variables on parameter servers, each worker by itself; alone, on one device.

    With a cluster in `TF_CONFIG` it is asynchronous training, as
    `compat.v1.experimental.ParameterServerStrategy`, where each worker has its devices
    as towers. Without one there are towers on this host's devices, and variables lie on
    the host's CPU, or on the only device: today's `CentralStorageStrategy`.

    Args:
      num_gpus_per_worker: the number of towers without a cluster; 0, as by default, is
        one tower on the first device. With a cluster it is only checked, and 0 means
        all devices of the worker.

    Raises:
      ValueError: the cluster has no servers or workers; there are fewer devices, or
        with a cluster another number.
      ClusterError: a server cannot be reached.
      TypeError: no whole number.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> contrib.ParameterServerStrategy(num_gpus_per_worker=2).num_towers
    2
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        number = _checked(num_gpus_per_worker, "num_gpus_per_worker", at_least=0)
        resolver = between_graph.TFConfigClusterResolver()
        if resolver.cluster_spec():
            _check_all(number)
            super().__init__(between_graph.BetweenGraphStrategy(resolver))
        else:
            devices = _first(number or 1, "num_gpus_per_worker")
            super().__init__(mirrored.CentralStorageStrategy(devices))

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "non_slot_devices")


@final
@ADAPTERS.of_type(tpu.TPUStrategy)
class TPUStrategy(DistributionStrategy):
    """One tower per core of a TPU system, or per device of any other platform.

    Args:
      tpu_cluster_resolver: by default one of all processes that there are.
      steps_per_run: is for your own use, as is the attribute of this name.
      num_cores: the number of towers, which is only checked.

    Raises:
      ValueError: another number of cores was found; `steps_per_run` is below 1.
      TypeError: something else than a resolver, or than whole numbers.
      ClusterError: the processes could not start together.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> contrib.TPUStrategy(num_cores=8).num_towers
    8
    """

    steps_per_run = 1

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int = 1,
        num_cores: int | None = None,
    ) -> None:
        steps = _checked(steps_per_run, "steps_per_run", at_least=1)
        strategy = tpu.TPUStrategy(tpu_cluster_resolver)
        found = strategy.num_replicas_in_sync
        if num_cores is not None and _checked(num_cores, "num_cores", 1) != found:
            raise ValueError(
                f"`num_cores` was {num_cores}, but the system has {found} cores."
            )
        super().__init__(strategy)
        self.steps_per_run = steps


@final
@ADAPTERS.of_type(current.DefaultStrategy)
class DefaultDistributionStrategy(DistributionStrategy):
    """The strategy of code that runs under none; `get_distribution_strategy()` has it.

    Functions are called as they are, and values come back as they are. Its methods
    about all towers are for functions of `merge_call`.
    """

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block that changes nothing."""
        if current.has_strategy():
            raise ContextError(
                "Must not nest DistributionStrategy scopes. The default strategy's was "
                f"entered inside that of {current.get_strategy()!r}."
            )
        return super().scope()

    @property
    def worker_devices(self) -> NoReturn:
        """None."""
        raise _unsupported("worker_devices")

    @property
    def parameter_devices(self) -> NoReturn:
        """None."""
        raise _unsupported("parameter_devices")

    @property
    def worker_device_index(self) -> NoReturn:
        """None."""
        raise _unsupported("worker_device_index")

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "non_slot_devices")

    def broadcast(self, tensor: PyTree, destinations: Any = None) -> PyTree:
        """`tensor` as it is."""
        require_cross_tower(self, "broadcast")
        return tensor

    def reduce(
        self, aggregation: Any, value: PyTree, destinations: Any = None
    ) -> PyTree:
        """`value` as it is; of what `map` gave, the sum or the mean of all elements."""
        require_cross_tower(self, "reduce")
        op = operation_of(aggregation)
        return value.reduced(op) if isinstance(value, MapOutput) else value

    def batch_reduce(
        self, aggregation: Any, value_destination_pairs: Sequence[tuple[PyTree, Any]]
    ) -> list[PyTree]:
        """The values as they are."""
        require_cross_tower(self, "batch_reduce")
        operation_of(aggregation)
        return [value for value, _ in checked_pairs(value_destination_pairs)]


# Nobody else holds it, and it is one object for ever.
_DEFAULT = ADAPTERS.of(current.get_strategy())


def _unsupported(name: str) -> ContextError:
    return ContextError(
        f"`{name}` is not supported by the default strategy, which has no devices of "
        "its own. Ask the strategy that your code is run with."
    )


def _checked(given: object, name: str, at_least: int) -> int:
    number = whole(given)
    if number is None:
        raise TypeError(f"`{name}` was {given!r}; a whole number was wanted.")
    if number < at_least:
        raise ValueError(f"`{name}` was {number}; {at_least} or more was wanted.")
    return number


def _check_all(number: int) -> None:
    """Raise unless this is the number of this process's devices, or 0."""
    found = len(_devices.default_devices())
    if number not in (0, found):
        raise ValueError(
            f"`num_gpus_per_worker` was {number}, but this process has {found} "
            "devices, all of which are used. Start it with so many "
            "(`CUDA_VISIBLE_DEVICES`), or leave the number out."
        )


def _first(given: object, name: str) -> tuple[Device, ...]:
    """So many of this host's devices."""
    number, found = _checked(given, name, at_least=1), _devices.default_devices()
    if number > len(found):
        raise ValueError(
            f"`{name}` was {number}, but this host has {len(found)} devices: "
            f"{_devices.names(found)}."
        )
    return found[:number]
