"""Reductions of trees of arrays over replicas.

    python benchmarks/reductions.py [allreduce] [wide] [compressed]
    python benchmarks/reductions.py overlap    # needs `pip install libtpu`

On simulated CPU devices, which share the computer's memory: nothing is slow to send.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Before JAX is imported, for `overlap`: no TPU is looked for.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Comparison, benchmark, in_turn, main, scaled, seconds_of
from _training import AXIS, Devices, PyTree, all_reduce_mean, mapped, pmean_of_each
from jax import lax
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.program import Program
from jaxstrategy._src.tracing.traced_step import ReplicaStep
from jaxstrategy.experimental import CommunicationOptions

Shape = tuple[int, ...]
Reduce = Callable[[PyTree], PyTree]
KB, MB = 2**10, 2**20
REPLICAS = 8


# The shapes of the parameters, and so of the gradients, of well-known networks.


def _dense(inputs: int, outputs: int) -> list[Shape]:
    return [(inputs, outputs), (outputs,)]


def resnet50() -> list[Shape]:
    """K. He et al. Deep residual learning for image recognition. CVPR 2016, table 1."""
    shapes: list[Shape] = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        wide = 4 * width
        for block in range(blocks):
            shapes += [(1, 1, channels, width), (width,), (width,)]
            shapes += [(3, 3, width, width), (width,), (width,)]
            shapes += [(1, 1, width, wide), (wide,), (wide,)]
            if block == 0:  # the shortcut has another number of channels
                shapes += [(1, 1, channels, wide), (wide,), (wide,)]
            channels = wide
    return [*shapes, *_dense(channels, 1000)]


def bert_base() -> list[Shape]:
    """J. Devlin et al. BERT: pre-training of deep bidirectional transformers. 2019."""
    units = 768
    norm: list[Shape] = [(units,), (units,)]
    shapes: list[Shape] = [(30522, units), (512, units), (2, units), *norm]
    for _ in range(12):
        shapes += 4 * _dense(units, units) + norm
        shapes += _dense(units, 4 * units) + _dense(4 * units, units) + norm
    return [*shapes, *_dense(units, units)]


def nbytes(shapes: Sequence[Shape]) -> int:
    return 4 * sum(map(math.prod, shapes))


NETWORKS: Mapping[str, list[Shape]] = {
    "ResNet-50": resnet50(),
    "BERT-base": bert_base(),
    "20 x 8 MLP": 20 * _dense(8, 8),
}
assert nbytes(NETWORKS["ResNet-50"]) == 4 * 25_557_032
assert nbytes(NETWORKS["BERT-base"]) == 4 * 109_482_240

# In packs.

# Number of arrays, and bytes of each.
GRID = [
    *itertools.product((10, 100, 1000), (1 * KB, 4 * KB, 16 * KB)),
    *itertools.product((100,), (8 * KB, 32 * KB, 64 * KB, 256 * KB)),
    *((50, 1 * MB), (4, 16 * MB), (1, 64 * MB)),
]
LOOP, ALONE = "in a loop", "by itself"
# Trees larger than this are reduced by themselves only: a loop holds them twice.
LARGEST_LOOP = 128 * MB


def size_text(size: int) -> str:
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


@benchmark(
    dict(
        only=("10 x", "100 x", "MLP"),
        devices=(2, 8),
        quantity=(LOOP, ALONE),
        rounds=100,
        seconds=0.4,
    ),
    dict(seconds=0.3, devices=(8,), only=("10 x", "MLP")),
)
def allreduce(args: Any) -> Iterator[Comparison]:
    """Reducing a tree in packs is faster than `lax.psum` of it, and never slower.

    The sum of trees of arrays of one size, and of the shapes of well-known networks
    (`--only` has parts of their names), by `all_reduce` in `run`; by one `lax.psum` in
    a `shard_map` by hand; by a `lax.pmean` for each array (`leaves`); and by `psum`
    once more (`again`): how far to trust a ratio. In a loop of reductions in one
    program, and by itself with call and wait.
    """
    simulated = js.simulate(max(args.devices))
    trees = dict(NETWORKS)
    for number, size in GRID:
        trees[f"{number} x {size_text(size)}"] = [(size // 4,)] * number
    for name, shapes in trees.items():
        if not any(wanted in name for wanted in args.only):
            continue
        for n, quantity in itertools.product(args.devices, args.quantity):
            if quantity == ALONE or nbytes(shapes) <= LARGEST_LOOP:
                jax.clear_caches()  # and what compiled programs hold
                how = simulated[:n], quantity == LOOP, args
                yield from compare_packs(f"{name}, {n} devices", shapes, *how)


def compare_packs(
    case: str,
    shapes: Sequence[Shape],
    devices: Devices,
    is_loop: bool,
    args: Any,
) -> Iterator[Comparison]:
    """All forms of one case."""
    # A loop has so many turns that it moves some megabytes.
    turns = min(max(4 * MB // nbytes(shapes), 2), 10) if is_loop else 1
    n, draw = len(devices), np.random.default_rng(0)
    values = [draw.random((n, *shape), np.float32) for shape in shapes]
    strategy = js.MirroredStrategy(devices)
    trees = tuple(map(strategy.per_replica, values))

    def repeated(reduce: Reduce) -> Reduce:
        def step(tree: PyTree) -> PyTree:
            def turn(_: Any, carry: PyTree) -> PyTree:
                return jax.tree.map(lambda x, s: x + 0.01 * s, tree, reduce(carry))

            return lax.fori_loop(0, turns, turn, tree)

        return step if is_loop else reduce

    def summed(tree: PyTree) -> PyTree:
        return js.get_replica_context().all_reduce("sum", tree)

    def by_hand(reduce: Reduce) -> Callable[[], object]:
        def step(stacked: PyTree) -> PyTree:
            done = repeated(reduce)(tuple(x.reshape(x.shape[1:]) for x in stacked))
            return jax.tree.map(lambda x: x[None], done) if is_loop else done

        program = mapped(step, strategy.mesh, P(AXIS), P(AXIS) if is_loop else P())
        return functools.partial(jax.jit(program), tuple(x.stacked for x in trees))

    def psum(tree: PyTree) -> PyTree:
        return lax.psum(tree, AXIS)

    theirs = {"psum": psum, "leaves": pmean_of_each, "again": psum}
    programs = {"run": functools.partial(strategy.run(repeated(summed)), trees)}
    programs |= {name: by_hand(reduce) for name, reduce in theirs.items()}

    def seconds(program: Callable[[], object]) -> float:
        return seconds_of(lambda: jax.block_until_ready(program()))

    for program in programs.values():
        seconds(program)  # compiles it
    measures = {k: functools.partial(seconds, v) for k, v in programs.items()}
    times = scaled(in_turn(measures, args.rounds, args.seconds), 1e6 / turns)
    is_small = nbytes([max(shapes, key=math.prod)]) <= 4 * KB
    target = 1 / 3 if is_small and is_loop and n == 8 else 1.03
    yield Comparison(case, LOOP if is_loop else ALONE, "us", times, target)


# The first reduction.

LAYER = ((64, 64), (64,), (3, 3, 16, 16), (16,), (256, 10))


@benchmark(dict(leaves=(500, 10000), most=2000, rounds=1), dict(leaves=(500,)))
def wide(args: Any) -> Iterator[Comparison]:
    """The first reduction of a wide tree costs less than by hand, and grows with it.

    Trees of some thousands of leaves of five types, or of no two shapes alike, outside
    of steps: processor seconds of the first `strategy.reduce`, compiling included,
    against a `shard_map` by hand with one `lax.psum`. By hand 10,000 leaves take over
    10 minutes: beyond `--most` leaves that form is left out.
    """
    strategy, n = js.MirroredStrategy(js.simulate(REPLICAS)), REPLICAS
    kinds: tuple[Any, ...] = ("few types", "many types")
    for kind, count in itertools.product(kinds, args.leaves):
        shapes = [LAYER[k % len(LAYER)] for k in range(count)]
        if kind == "many types":
            shapes = [(k % 200 + 1, k // 200 + 1) for k in range(count)]
        ones = (np.ones((n, *shape), np.float32) for shape in shapes)
        tree = [strategy.per_replica(each) for each in ones]
        stacked = jax.block_until_ready([leaf.stacked for leaf in tree])

        def reduce(tree=tree) -> Any:
            return strategy.reduce("sum", tree)

        def by_hand(stacked=stacked) -> Any:
            def total(leaves: list[jax.Array]) -> list[jax.Array]:
                return lax.psum([leaf[0] for leaf in leaves], AXIS)

            return jax.jit(mapped(total, strategy.mesh, P(AXIS)))(stacked)

        def first(call: Callable[[], Any]) -> float:
            jax.clear_caches()
            start = time.process_time()
            results = jax.block_until_ready(call())
            seconds = time.process_time() - start
            assert all(float(r.ravel()[0]) == n for r in (results[0], results[-1]))
            return seconds

        forms = {"reduce": functools.partial(first, reduce)}
        if count <= args.most:
            forms["by hand"] = functools.partial(first, by_hand)
        found = in_turn(forms, args.rounds if count <= args.most else 1)
        yield Comparison(
            f"{count} leaves, {kind}",
            "first reduction",
            "cpu s",
            {"by hand": [], **found} if count > args.most else found,
            1.0 if count <= args.most else None,
            tolerance=0.2,
        )


# Compressed.

GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]
LEVELS: Any = {"implementation": "hierarchical", "groups": GROUPS}
OPTIONS = {
    "exact": CommunicationOptions(),
    "exact, two levels": CommunicationOptions(**LEVELS),
    "int8": CommunicationOptions(compression="int8"),
    "int8, two levels": CommunicationOptions(compression="int8", **LEVELS),
    "PowerSGD(1)": CommunicationOptions(compression=js.experimental.PowerSGD(1)),
    "PowerSGD(4)": CommunicationOptions(compression=js.experimental.PowerSGD(4)),
}


@benchmark(dict(only=("",)), dict(only=("MLP",)))
def compressed(args: Any) -> Iterator[Comparison]:
    """8 bits send 0.27 of what exact gradients do, thin matrices far less.

    Bytes that each of 8 replicas sends in a reduction around a ring, counted from what
    `explain` says, in all and between groups of four, for well-known networks.
    """
    # A step for each form is what is asked for.
    warnings.simplefilter("ignore", js.errors.RecompilationWarning)
    strategy = js.MirroredStrategy(js.simulate(REPLICAS))
    networks = {
        k: v for k, v in NETWORKS.items() if any(part in k for part in args.only)
    }
    for name, shapes in networks.items():
        exact = sent(strategy, shapes, OPTIONS["exact"])
        for form, options in OPTIONS.items():
            pairs = zip(sent(strategy, shapes, options), exact, strict=True)
            for quantity, (own, theirs) in zip(
                ("sent", "sent between groups"), pairs, strict=True
            ):
                values = {"compressed": [own / 1e6], "exact": [theirs / 1e6]}
                is_claimed = form == "int8" and exact[0] > 1e6 and quantity == "sent"
                target = 0.27 if is_claimed else None
                yield Comparison(f"{name}, {form}", quantity, "MB", values, target)


def reduction(options: CommunicationOptions) -> Callable[..., PyTree]:
    """From gradients and a state to their mean and the next state."""

    def step(grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        context = js.get_replica_context()
        if options.compression is None:
            return context.all_reduce("mean", grads, options), state
        return context.all_reduce_compressed("mean", grads, state, options)

    return step


def sent(
    strategy: js.Strategy, shapes: Sequence[Shape], options: CommunicationOptions
) -> tuple[float, float]:
    """Bytes that a replica sends, in all and between groups."""
    like = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    types = [jax.ShapeDtypeStruct((REPLICAS, *shape), np.float32) for shape in shapes]
    grads = [js.PerReplica(each) for each in types]
    is_exact = options.compression is None
    state = () if is_exact else strategy.compression_state(like, options)
    made = strategy.explain(reduction(options), (grads, state), compiled=False)
    found = made.collectives
    total = between = 0.0
    for each in found:
        ring = js.profiling.Topology(1.0, 0.0, each.group or REPLICAS)
        seconds = ring.ring(each.kind, float(each.nbytes)) * (each.times or 1)
        total += seconds
        # Around a ring of all replicas two of the links are between groups.
        between += seconds * (each.group in (None, len(GROUPS)))
    return total, between


# Beside the computation.

# What XLA has to know of a GPU to compile for it: those of an H100, as XLA's own tests
# describe it.
H100 = """
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


@benchmark(dict(targets=("v5e:2x2", "v6e:2x2", "gpu:8"), layers=0, width=1024, pack=0))
def overlap(args: Any) -> Iterator[Comparison]:
    """Gradients are reduced while earlier layers are still computed.

    A step is compiled ahead of time for accelerators that need not be there, by
    `libtpu`, or `jax-cuda12-plugin` and `jax-cuda12-pjrt`. Compiled programs say in
    which order everything runs: counted are bytes that are reduced while nothing is
    computed. `--pack` is `bytes_per_pack`; 0 is the default, and for `--layers` as many
    as fit.
    """
    for target in args.targets:
        is_gpu = target.startswith("gpu")
        layers = args.layers or (24 if is_gpu else 6)
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
            program = compiled_step(strategy, layers, args.width)
            found[name] = reductions_of(program)
        told = [f"{each.beside} of {each.count}" for each in found.values()]
        yield Comparison(
            f"{target}, {layers} x {args.width}",
            "reduced while nothing is computed",
            "B",
            {name: [each.exposed] for name, each in found.items()},
            # GPUs overlap anyway, but for models of less than 30 MB.
            target=1.0 if is_gpu else 0.75,
            note="{} reductions beside the computation, by default {}".format(*told),
        )


def devices_of(target: str) -> list[Any] | None:
    """Devices of one host to compile for; None where the package is missing."""
    if not target.startswith("gpu"):
        if importlib.util.find_spec("libtpu") is None:
            return None
        found: Any = topologies.get_topology_desc(target, platform="tpu")
        return list(found.devices)
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        return None
    count = target.partition(":")[2]
    found = topologies.get_topology_desc(
        "", platform="cuda", topology=f"1x1x{count}", target_config=H100
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

    grads = all_reduce_mean(jax.grad(loss)(params))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def compiled_step(strategy: js.Strategy, layers: int, width: int) -> str:
    """The program of that step, in the order in which it runs."""

    def struct(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"kernel": struct(width, width), "bias": struct(width)}
    params = {f"layer{number}": layer for number in range(layers)}
    rows = js.PerReplica(struct(strategy.num_replicas_in_sync, 128, width))
    arguments = (params, rows), {}
    leaves, signature = _signature.flatten(gradient_step, arguments, abstract=True)
    environment = strategy._executor.environment
    step = ReplicaStep(lambda: gradient_step, environment, signature, lambda: True)
    lowered = Program(step, RunOptions(), lambda traced: None).lower(leaves)
    text = lowered.compile().as_text()
    assert text is not None
    return text


# What a program says. Names of instructions tell of TPUs' asynchronous reductions:
# on v5e they are fusions, on v6e calls on the sparse cores.
LINE = re.compile(r"\s*(?:ROOT )?%?(?P<name>\S+) = (?P<type>.*?) (?P<op>[a-z-]+)\(")
SHAPE = re.compile(r"(?:f32|bf16|f16)\[([\d,]*)\]")
BEGIN = re.compile(r"async-collective-start|all-reduce-start|all-reduce\S*call-update")
END = re.compile(r"async-collective-done|all-reduce-done|all-reduce\S*call-done")
COMPUTES = ("fusion", "convolution", "dot", "custom-call")


@dataclasses.dataclass
class Reductions:
    """Those of a program: bytes beside which nothing is computed, and how many."""

    exposed: int = 0
    beside: int = 0
    count: int = 0


def reductions_of(program: str) -> Reductions:
    """What the main computation of a scheduled program reduces."""
    found = Reductions()
    computed: dict[str, bool] = {}  # of each that is going on, whether anything was
    lines = program[program.index("\nENTRY") :].splitlines()
    for match in filter(None, map(LINE.match, lines)):
        name, operation = match["name"], match["op"]
        key = re.sub(r"-(start|done|update)", "", name)
        if BEGIN.match(name):
            computed[key] = False
        elif END.match(name) or operation == "all-reduce":
            is_beside = computed.pop(key, False)
            shapes = [s.split(",") for s in SHAPE.findall(match["type"])]
            size = nbytes([tuple(map(int, filter(None, shape))) for shape in shapes])
            found.exposed += size * (not is_beside)
            found.beside += is_beside
            found.count += 1
        elif operation in COMPUTES:
            computed = dict.fromkeys(computed, True)
    return found


BENCHMARKS = [allreduce, wide, compressed, overlap]

if __name__ == "__main__":
    main(BENCHMARKS)
