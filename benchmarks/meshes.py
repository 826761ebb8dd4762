"""Claim: replicas of several devices, and several on a device, cost what they must.

Training steps on simulated CPU devices, against what stands beside each; forms take
turns in one process:

- `dispatch`: the call of a step on one device for each replica, against the same step
  as `jax.jit(jax.shard_map(...))` by hand; with `--before PATH`, the folder of another
  version of the package, against the same call there (a process for each version);
- `lanes`: a step of 64 replicas that share one device, against one `jax.jit` of the
  plain step on all their rows: a perceptron and a small convolutional network. Each
  replica has a gradient of its own, which is written before all are added up: of fewer
  rows for each (a quarter), that takes as long as the rest (1.8 instead of 1.1);
- `first-call`: processor seconds of the first call without its step, tracing and
  compiling, of 8, 64 and 512 replicas on one device, against one replica, and of 64
  and 512 against 8;
- `cores`: a perceptron whose layers each replica divides over its devices, for R
  replicas of c devices, against `jax.jit` by hand of the step on the whole batch with
  the same placements: the step, the bytes of the state on a device (exact), and how
  often the compiled program gathers an array (exact; nothing needs that).

The losses of all forms are compared after some steps. It prints; only with `--check` is
a missed target a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _compiled import compiled
from _timing import Comparison, add_options, in_turn, report
from dispatch import Model, by_hand, with_run
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any

PARTS = ("dispatch", "lanes", "first-call", "cores")
DISPATCH, UNCHANGED = 1.10, 1.02
LANES, FIRST_CALL, FLAT, CORES, STATE = 1.5, 1.5, 1.1, 1.10, 1.0
# How far losses may be from those of the other form.
TOLERANCE = 1e-4
COMPARED, BURST, FIRST_CALLS = 4, 3, 3
RATE, MOMENTUM = 0.05, 0.9


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
      leaves: of the models for `dispatch`.
      replicas: on one device, for `lanes`.
      rows: of each of them; a perceptron has four times as many.
      units: of a layer.
      shared: how many replicas share the device, for `first-call`.
      splits: R and c.
    """

    leaves: Sequence[int] = (20, 300)
    replicas: int = 64
    rows: int = 8
    units: int = 256
    shared: Sequence[int] = (8, 64, 512)
    splits: Sequence[tuple[int, int]] = ((8, 1), (4, 2), (2, 4), (1, 8))


QUICK = Sizes((4,), 8, 2, 32, (8,), ((8, 1), (4, 2)))


# Losses of a model's parameters and a batch.


def perceptron(units: int) -> tuple[PyTree, Callable[..., jax.Array], Any]:
    """Square layers; parameters, loss, and the shape of a row."""
    draw = np.random.default_rng(0).normal
    params = [draw(0, units**-0.5, (units, units)) for _ in range(4)]

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    return params, loss, (units,)


def convolutions(units: int) -> tuple[PyTree, Callable[..., jax.Array], Any]:
    """Two convolutions of images, of as many channels as fit `units`."""
    draw = np.random.default_rng(0).normal
    channels = max(units // 16, 4)
    params = [
        draw(0, 0.3, (3, 3, 3, channels)),
        draw(0, 0.1, (3, 3, channels, channels)),
        draw(0, 0.1, (channels, 10)),
    ]

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=layout)
        return jax.nn.relu(y)

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        first, second, last = params
        y = convolved(convolved(x, first), second).mean((1, 2)) @ last
        return jnp.mean((y - x.mean((1, 2, 3))[:, None]) ** 2)

    return params, loss, (16, 16, 3)


MODELS = {"perceptron": perceptron, "convolutions": convolutions}
MORE_ROWS = {"perceptron": 4, "convolutions": 1}


def blocks(units: int) -> tuple[PyTree, Callable[..., jax.Array], Any]:
    """Pairs of layers: the first divides its results, the second its terms."""
    draw = np.random.default_rng(0).normal
    wide = 4 * units
    params = [
        {
            "up": draw(0, units**-0.5, (units, wide)),
            "down": draw(0, wide**-0.5, (wide, units)),
        }
        for _ in range(3)
    ]

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        y = x
        for layer in params:
            y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
        return jnp.mean((y - 1) ** 2)

    return params, loss, (units,)


SPECS = {"up": P(None, "core"), "down": P("core", None)}
_numbers = itertools.count()


def step_of(loss: Callable[..., jax.Array], mean: Callable[[PyTree], PyTree]):
    """A new step of gradient descent with momentum, with a name of its own."""

    def step(state: PyTree, x: jax.Array) -> tuple[PyTree, jax.Array]:
        params, moments = state
        value, grads = mean(jax.value_and_grad(loss)(params, x))
        moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, grads)
        params = jax.tree.map(lambda w, m: w - RATE * m, params, moments)
        return (params, moments), value

    step.__name__ = step.__qualname__ = f"step{next(_numbers)}"
    return step


def over_replicas(tree: PyTree) -> PyTree:
    """Its mean, in a step of `run`."""
    return js.get_replica_context().all_reduce("mean", tree)


class Training:
    """A training loop.

    Args:
      step: what is called.
      state: the first one.
      batch: of each step.
      name: of the step.
    """

    def __init__(
        self, step: Callable[..., Any], state: PyTree, batch: PyTree, name: str
    ) -> None:
        self._step, self.state, self._batch, self.name = step, state, batch, name

    def next(self) -> jax.Array:
        """The loss of one more step."""
        self.state, loss = self._step(self.state, self._batch)
        return loss

    def burst(self) -> float:
        """Milliseconds of a step, of a few."""
        times = []
        for _ in range(BURST):
            start = time.perf_counter()
            jax.block_until_ready(self.next())
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def losses(self) -> list[float]:
        """Of the next steps."""
        return [float(self.next()) for _ in range(COMPARED)]

    @property
    def state_bytes(self) -> int:
        """Of the state on one device."""
        leaves = jax.tree.leaves(self.state)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def first_state(params: PyTree) -> PyTree:
    """Parameters and moments, on the host."""
    params = jax.tree.map(lambda w: w.astype(np.float32), params)
    return params, jax.tree.map(np.zeros_like, params)


def rows_of(shape: Sequence[int], count: int) -> np.ndarray:
    """A batch."""
    found = np.random.default_rng(1).normal(size=(count, *shape))
    return found.astype(np.float32)


def check_losses(case: str, forms: Mapping[str, Training]) -> None:
    """Says how far the losses of all forms are apart; ends this when they differ."""
    first, *others = (form.losses() for form in forms.values())
    apart = max(
        abs(a - b) / abs(b)
        for other in others
        for a, b in zip(first, other, strict=True)
    )
    print(f"{case}: losses {apart:.1e} apart after {COMPARED} steps")
    if apart > TOLERANCE:
        sys.exit(f"{case}: at most {TOLERANCE:g} apart is right.")


# Dispatch.


def compare_dispatch(
    sizes: Sizes, devices: Sequence[jax.Device], args: argparse.Namespace
) -> Iterator[Comparison]:
    """Microseconds until a call returns, of one replica on each device."""
    before = args.before
    for leaves in sizes.leaves:
        case = f"{leaves} leaves, {len(devices)} devices"
        if before is None:
            model = Model(layers=leaves // 2)
            loops = {"run": with_run, "shard_map": by_hand}
            made = {name: make(model, devices) for name, make in loops.items()}
            bursts = {name: functools.partial(_dispatch, x) for name, x in made.items()}
            for burst in bursts.values():
                burst()
            times = in_turn(bursts, args.rounds, args.seconds)
            yield Comparison(case, "dispatch", "us", times, DISPATCH)
            continue
        here = pathlib.Path(js.__file__).parent.parent
        with _Served(here, leaves, len(devices)) as now:
            with _Served(before, leaves, len(devices)) as then:
                bursts = {"run": now.burst, "before": then.burst}
                times = in_turn(bursts, 5 * args.rounds, args.seconds)
        yield Comparison(case, "dispatch", "us", times, UNCHANGED)


def _dispatch(loop: Any) -> float:
    return 1e6 * loop.burst()[0]


class _Served:
    """A process that takes steps with one version of the package, when it is told to.

    Args:
      package: the folder that holds it.
      leaves: of the model.
      devices: how many.
    """

    def __init__(self, package: pathlib.Path, leaves: int, devices: int) -> None:
        arguments = ["--serve", str(package.resolve()), str(leaves), str(devices)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**os.environ, "PYTHONPATH": str(package.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.burst()  # compiles it

    def burst(self) -> float:
        """Microseconds of a call, of a few."""
        assert self._process.stdin and self._process.stdout, "they are pipes"
        self._process.stdin.write("burst\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def serve(package: str, leaves: int, devices: int) -> None:
    """Takes steps for each line that comes in, and says how long calls took."""
    found = pathlib.Path(js.__file__).resolve()
    if not found.is_relative_to(package):
        sys.exit(f"jaxstrategy was imported from {found}, not from {package}")
    loop = with_run(Model(layers=leaves // 2), js.simulate(devices))
    for _ in sys.stdin:
        print(_dispatch(loop), flush=True)


# Several replicas on a device.


def lanes(model: str, sizes: Sizes, replicas: int, device: jax.Device) -> Training:
    """Training of replicas that share a device."""
    params, loss, shape = MODELS[model](sizes.units)
    strategy = js.MirroredStrategy([device], replicas_per_device=replicas)
    rows = MORE_ROWS[model] * sizes.rows
    batch = rows_of(shape, replicas * rows)
    step = step_of(loss, over_replicas)
    return Training(
        strategy.run(step, options=js.RunOptions(donate_argnums=0)),
        strategy.mirror(first_state(params)),
        strategy.per_replica(batch.reshape(replicas, rows, *shape)),
        step.__name__,
    )


def merged(model: str, sizes: Sizes, replicas: int, device: jax.Device) -> Training:
    """The same by one step on all rows, with JAX alone."""
    params, loss, shape = MODELS[model](sizes.units)
    step = step_of(loss, lambda tree: tree)
    rows = MORE_ROWS[model] * sizes.rows
    return Training(
        jax.jit(step, donate_argnums=0),
        jax.device_put(first_state(params), device),
        jax.device_put(rows_of(shape, replicas * rows), device),
        step.__name__,
    )


def compare_lanes(
    sizes: Sizes, device: jax.Device, args: argparse.Namespace
) -> Iterator[Comparison]:
    """Milliseconds of a step of many replicas on one device."""
    for model in MODELS:
        forms = {
            "lanes": lanes(model, sizes, sizes.replicas, device),
            "merged": merged(model, sizes, sizes.replicas, device),
        }
        case = f"{model}, {sizes.replicas} replicas"
        check_losses(case, forms)
        bursts = {name: form.burst for name, form in forms.items()}
        times = in_turn(bursts, args.rounds, args.seconds)
        yield Comparison(case, "step, one device", "ms", times, LANES)


def compare_first_calls(sizes: Sizes, device: jax.Device) -> Iterator[Comparison]:
    """Processor seconds of the first call, of so many replicas on a device."""
    for model in MODELS:
        measures = {
            count: functools.partial(first_call, model, sizes, count, device)
            for count in (1, *sizes.shared)
        }
        measures[1]()  # whatever JAX does only once
        times = in_turn({str(n): m for n, m in measures.items()}, FIRST_CALLS)
        fewest = sizes.shared[0]
        for count in sizes.shared:
            case = f"{model}, {count} replicas on a device"
            values = {"replicas": times[str(count)], "fewer": times["1"]}
            yield Comparison(case, "first call, to 1", "cpu s", values, FIRST_CALL)
        for count in sizes.shared[1:]:
            case = f"{model}, {count} replicas on a device"
            values = {"replicas": times[str(count)], "fewer": times[str(fewest)]}
            quantity = f"first call, to {fewest}"
            yield Comparison(case, quantity, "cpu s", values, FLAT)


def first_call(model: str, sizes: Sizes, count: int, device: jax.Device) -> float:
    """Processor seconds of the first call without its step."""
    few = dataclasses.replace(sizes, rows=1, units=min(sizes.units, 64))
    form = lanes(model, few, count, device)
    jax.clear_caches()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        jax.block_until_ready(form.next())
        seconds.append(time.process_time() - start)
    return seconds[0] - seconds[-1]


# Several devices of a replica.


def of_cores(sizes: Sizes, split: tuple[int, int], devices: Any) -> Training:
    """Training of R replicas of c devices."""
    params, loss, shape = blocks(sizes.units)
    strategy = js.MirroredStrategy(devices, logical_axes={"core": split[1]})
    rows = rows_of(shape, 8 * sizes.rows).reshape(split[0], -1, *shape)
    step = step_of(loss, over_replicas)
    return Training(
        strategy.run(step, options=js.RunOptions(donate_argnums=0)),
        placed(first_state(params), strategy.mesh),
        strategy.per_replica(rows),
        step.__name__,
    )


def of_xla(sizes: Sizes, split: tuple[int, int], devices: Any) -> Training:
    """The same by one step on all rows, placed likewise, with JAX alone."""
    params, loss, shape = blocks(sizes.units)
    mesh = Mesh(np.array(devices).reshape(split), ("replica", "core"))
    state = placed(first_state(params), mesh)
    lies = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = step_of(loss, lambda tree: tree)
    rows = NamedSharding(mesh, P("replica"))
    whole = NamedSharding(mesh, P())
    return Training(
        jax.jit(step, donate_argnums=0, out_shardings=(lies, whole)),
        state,
        jax.device_put(rows_of(shape, 8 * sizes.rows), rows),
        step.__name__,
    )


def placed(state: PyTree, mesh: Mesh) -> PyTree:
    """The state of `blocks`, divided over the devices of a replica."""

    def place(path: Any, leaf: np.ndarray) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, SPECS[path[-1].key]))

    return jax.tree_util.tree_map_with_path(place, state)


def compare_cores(
    sizes: Sizes, devices: Sequence[jax.Device], args: argparse.Namespace
) -> Iterator[Comparison]:
    """Milliseconds of a step, bytes of the state; nothing may be gathered."""
    for split in sizes.splits:
        case = f"{split[0]} x {split[1]}"
        make = {"run": of_cores, "jit": of_xla}
        forms = {name: each(sizes, split, devices) for name, each in make.items()}
        check_losses(case, forms)
        for name, form in forms.items():
            counts = dict(collectives_of(form))
            print(f"{case}: {name} has {told(counts)}")
            if name == "run" and "all-gather" in counts:
                sys.exit(f"{case}: nothing needs an all-gather.")
        held = {name: [form.state_bytes / 2**20] for name, form in forms.items()}
        yield Comparison(case, "state on a device", "MiB", held, STATE)
        bursts = {name: form.burst for name, form in forms.items()}
        times = in_turn(bursts, args.rounds, args.seconds)
        yield Comparison(case, "step", "ms", times, CORES)


def collectives_of(form: Training) -> dict[str, int]:
    """How often a step does each kind of collective."""
    counts: dict[str, int] = {}
    for each in compiled(form.name).collectives:
        counts[each.kind] = counts.get(each.kind, 0) + each.times
    return counts


def told(counts: Mapping[str, int]) -> str:
    """The same in words."""
    listed = [f"{count} {kind}" for kind, count in sorted(counts.items())]
    return ", ".join(listed) or "no collectives"


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All comparisons that were asked for."""
    sizes = QUICK if args.quick else Sizes()
    devices = js.simulate(8)
    if "dispatch" in args.only:
        yield from compare_dispatch(sizes, devices, args)
    if "lanes" in args.only:
        yield from compare_lanes(sizes, devices[0], args)
    if "first-call" in args.only:
        yield from compare_first_calls(sizes, devices[0])
    if "cores" in args.only:
        yield from compare_cores(sizes, devices, args)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    add("--before", type=pathlib.Path, help="another version, that holds jaxstrategy/")
    add("--quick", action="store_true", help="small models; try --rounds 5")
    add_options(parser, rounds=60, seconds=40.0)
    add("--serve", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    if args.serve:
        package, leaves, devices = args.serve
        serve(package, int(leaves), int(devices))
        return
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: the first to the second")
    report(measure(args), args)


if __name__ == "__main__":
    main()
