"""Claim: gradients are reduced while earlier layers are still computed.

A step is compiled ahead of time for accelerators that need not be there: the package
`libtpu` compiles for TPUs, `jax-cuda12-plugin` and `jax-cuda12-pjrt` for GPUs, each of
the version that JAX asks for. Compiled programs say in which order everything runs. So
this counts bytes that are reduced while nothing is computed; only a device tells what
that costs.

    pip install libtpu==0.0.50.*
    python benchmarks/overlap.py --check
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

# Before JAX is imported: no TPU is looked for, and CPU is where constants lie.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from _timing import Comparison, add_options, report
from jax.experimental import topologies

import jaxstrategy as js
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.tracing import roles
from jaxstrategy._src.tracing.program import Program
from jaxstrategy._src.tracing.replica_step import ReplicaStep
from jaxstrategy._src.tracing.stages.stages import stages_of
from jaxstrategy.experimental import CommunicationOptions

# What XLA has to know of a GPU to compile for it: those of an H100, as XLA's own tests
# describe it.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# With so many layers: TPUs are compiled for in a minute; on GPUs packs have 25 MiB.
TARGETS = {"v5e:2x2": 6, "v6e:2x2": 6, "gpu:8": 24}


def devices_of(target: str) -> list[Any] | None:
    """Devices of one host to compile for; None where the package is missing."""
    if not target.startswith("gpu"):
        if importlib.util.find_spec("libtpu") is None:
            return None
        found: Any = topologies.get_topology_desc(target, platform="tpu")
        return list(found.devices)
    if importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        return None
    count = target.partition(":")[2]
    found = topologies.get_topology_desc(
        "", platform="cuda", topology=f"1x1x{count}", target_config=_H100
    )
    return list(found.devices)


def gradient_step(params: Any, x: jax.Array) -> Any:
    """One step of gradient descent of a network of dense layers."""

    def loss(params: Any) -> jax.Array:
        hidden = x
        for name in sorted(params, key=lambda name: int(name[5:])):
            layer = params[name]
            hidden = jnp.tanh(hidden @ layer["kernel"] + layer["bias"])
        return (hidden**2).mean()

    grads = js.get_replica_context().all_reduce("mean", jax.grad(loss)(params))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def compiled(strategy: js.Strategy, layers: int, width: int) -> str:
    """The program of that step, in the order in which it runs."""
    floats = jnp.float32
    layer = {
        "kernel": jax.ShapeDtypeStruct((width, width), floats),
        "bias": jax.ShapeDtypeStruct((width,), floats),
    }
    params = {f"layer{number}": layer for number in range(layers)}
    rows: Any = jax.ShapeDtypeStruct(
        (strategy.num_replicas_in_sync, 128, width), floats
    )
    leaves, signature = roles.take_apart(
        gradient_step, (params, js.PerReplica(rows)), {}, abstract=True
    )
    environment = strategy._executor._environment
    step = ReplicaStep(lambda: gradient_step, environment, signature, lambda: True)
    lowered = Program(step, stages_of(step, RunOptions())).lower(leaves)
    text = lowered.compile().as_text()
    assert text is not None
    return text


# What a program says. Names of instructions tell of TPUs' asynchronous reductions:
# on v5e they are fusions, on v6e calls on the sparse cores.
_LINE = re.compile(r"\s*(?:ROOT )?%?(?P<name>\S+) = (?P<type>.*?) (?P<op>[a-z-]+)\(")
_SHAPE = re.compile(r"(?:f32|bf16|f16)\[([\d,]*)\]")
_BEGIN = re.compile(r"async-collective-start|all-reduce-start|all-reduce\S*call-update")
_END = re.compile(r"async-collective-done|all-reduce-done|all-reduce\S*call-done")
_COMPUTES = ("fusion", "convolution", "dot", "custom-call")


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The reductions of a program.

    Attributes:
      exposed: bytes that are reduced while nothing is computed.
      total: all bytes that are reduced.
      beside: how many reductions go on beside something.
      count: of all.
    """

    exposed: int
    total: int
    beside: int
    count: int


def reductions_of(program: str) -> Reductions:
    """What the main computation of a scheduled program reduces."""
    lines = program[program.index("\nENTRY") :].splitlines()
    exposed = total = beside = count = 0
    computed: dict[str, bool] = {}  # of each that is going on, whether anything was
    for match in filter(None, map(_LINE.match, lines)):
        name, operation = match["name"], match["op"]
        if _BEGIN.match(name):
            computed[_key(name)] = False
        elif _END.match(name) or operation == "all-reduce":
            is_beside = computed.pop(_key(name), False)
            size = _bytes(match["type"])
            total, count = total + size, count + 1
            exposed, beside = exposed + size * (not is_beside), beside + is_beside
        elif operation in _COMPUTES:
            computed = dict.fromkeys(computed, True)
    return Reductions(exposed, total, beside, count)


def _key(name: str) -> str:
    return re.sub(r"-(start|done|update)", "", name)


def _bytes(of_type: str) -> int:
    shapes = _SHAPE.findall(of_type)
    return 4 * sum(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """Bytes that are reduced alone, with overlap and without."""
    for target in args.targets:
        layers = args.layers or TARGETS.get(target, 6)
        devices = devices_of(target)
        if devices is None:
            print(f"{target}: the package that compiles for it is not installed")
            continue
        found = {}
        for name, overlap in (("overlap", True), ("default", False)):
            options = CommunicationOptions(
                overlap=overlap, bytes_per_pack=args.pack * overlap
            )
            strategy = js.MirroredStrategy(devices, communication_options=options)
            program = compiled(strategy, layers, args.width)
            found[name] = reductions_of(program)
        ours, default = found["overlap"], found["default"]
        yield Comparison(
            f"{target}, {layers} x {args.width}",
            "reduced while nothing is computed",
            "B",
            {name: [each.exposed] for name, each in found.items()},
            # GPUs overlap anyway, but for models of less than 30 MB.
            target=1.0 if target.startswith("gpu") else 0.75,
            note=f"{ours.beside} of {ours.count} reductions beside the computation, "
            f"by default {default.beside} of {default.count}",
        )


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--targets", nargs="+", default=TARGETS, help="of TPUs a topology, or gpu:8")
    add("--layers", type=int, default=0, help="0: as many as fit the target")
    add("--width", type=int, default=1024)
    add("--pack", type=int, default=0, help="bytes_per_pack, 0: the default")
    add_options(parser)
    args = parser.parse_args()
    report(measure(args), args)


if __name__ == "__main__":
    main()
