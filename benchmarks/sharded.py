"""State that is sharded, replicas of several devices, and several on a device.

    python benchmarks/sharded.py [sharded] [meshes]

Training steps on simulated CPU devices, against what stands beside each.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Comparison, benchmark, in_turn, main, scaled
from _training import (
    AXIS,
    Devices,
    FlaxTask,
    Perceptron,
    PyTree,
    Task,
    Training,
    Transformer,
    all_reduce_mean,
    bytes_on_a_device,
    check_losses,
    perceptron,
    sgd_task,
    unchanged,
    with_jit,
    with_run,
)
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.tracing.explanation.compiled_program import HloModule

numbers = itertools.count()


def named(step: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a step a name of its own, by which its program is found."""
    step.__name__ = step.__qualname__ = f"step{next(numbers)}"
    return step


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The only living program of a name: its memory and collectives of a device."""

    name: str

    @functools.cached_property
    def _module(self) -> tuple[Any, Any]:
        modules = {
            module.name: (module, executable)
            for executable in jax.devices()[0].client.live_executables()
            for module in executable.hlo_modules()
            if re.search(rf"(?:^|_|\W){self.name}\W*$", module.name)
        }
        assert len(modules) == 1, f"programs of {self.name}: {[*modules]}"
        return next(iter(modules.values()))

    @property
    def peak(self) -> int:
        stats = self._module[1].get_compiled_memory_stats()
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes

    @functools.cached_property
    def collectives(self) -> list[tuple[str, float, int]]:
        """Kind, bytes that a device sends in a ring, and how often."""
        replicas = js.MirroredStrategy(jax.devices())._replicas
        links = js.profiling.Topology(1.0, 0.0, replicas.count)
        module = HloModule(self._module[0].to_string())
        found = module.collectives(replicas, __file__)
        return [(c.kind, c.seconds(links, "ring"), c.least_times) for c in found]

    @property
    def sent(self) -> float:
        return sum(nbytes for _, nbytes, _ in self.collectives)


# What is trained.

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.01)
)
MODELS = {
    "perceptron": FlaxTask(Perceptron(4, 512), OPTIMIZER, 2),
    "transformer": FlaxTask(Transformer(512, 128, 8, "scan of remat"), OPTIMIZER, 2),
}
SMALL = {
    "perceptron": FlaxTask(Perceptron(1, 32), OPTIMIZER, 2),
    "transformer": FlaxTask(Transformer(32, 16, 2, "scan of remat"), OPTIMIZER, 2, 8),
}


# Implementations that are compared.


def with_sharding(
    task: FlaxTask, mesh: Mesh, sharding: js.StateSharding | None
) -> tuple[Training, float]:
    """As a user of jaxstrategy writes it, and the bytes sent that `explain` tells."""
    strategy = js.MirroredStrategy(list(mesh.devices.flat), sharding=sharding)
    step = named(task.step_with(all_reduce_mean))
    batch = [strategy.per_replica(rows) for rows in task.batch(mesh.size)]
    state = strategy.init(task.build, jax.random.key(0))
    run = strategy.run(step, options=js.RunOptions(donate_argnums=0))
    found = strategy.explain(run, (state, *batch), compiled=False)
    a_byte_a_second = js.profiling.Topology(1.0, 0.0, found.num_replicas)
    sent = found.communication_time(a_byte_a_second, "ring")
    return named_training(step, run, state, batch), sent


def named_training(step: Any, run: Any, state: Any, batch: Any) -> Training:
    training = Training(run, state, batch)
    training.name = step.__name__
    return training


def spec_of(parts: int, min_bytes: int, shape: tuple[int, ...], itemsize: int) -> P:
    """The longest dimension that can be divided is; that of layers is not."""
    if math.prod(shape) * itemsize < max(min_bytes, 1):
        return P()
    divided = [d for d, length in enumerate(shape) if length % parts == 0]
    longest = max(divided, key=lambda d: (shape[d], d), default=None)
    return P() if longest is None else P(*[None] * longest, AXIS)


def with_partitioner(task: FlaxTask, mesh: Mesh, kind: str, min_bytes: int) -> Training:
    """With `jax.jit`, and the state placed likewise for XLA's partitioner."""

    def placed(leaf: Any) -> NamedSharding:
        spec = spec_of(mesh.size, min_bytes, leaf.shape, leaf.dtype.itemsize)
        return NamedSharding(mesh, spec)

    everywhere = NamedSharding(mesh, P())
    shardings = jax.tree.map(placed, jax.eval_shape(task.build, jax.random.key(0)))
    of_gradients = shardings["params"]
    if kind == "optimizer":
        whole = jax.tree.map(lambda _: everywhere, of_gradients)
        shardings = {**shardings, "params": whole}

    def constrained(loss_and_grads: PyTree) -> PyTree:
        loss, grads = loss_and_grads
        return loss, lax.with_sharding_constraint(grads, of_gradients)

    step = named(task.step_with(constrained))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))
    rows = [x.reshape(-1, *x.shape[2:]) for x in task.batch(mesh.size)]
    batch = jax.device_put(rows, NamedSharding(mesh, P(AXIS)))
    state = jax.jit(task.build, out_shardings=shardings)(jax.random.key(0))
    return named_training(step, jitted, state, batch)


def first_call_seconds(form: Training, calls: int) -> float:
    """Processor seconds of the first of some calls, without its step."""
    seconds = []
    for _ in range(calls):
        start = time.process_time()
        form.times()
        seconds.append(time.process_time() - start)
    return seconds[0] - seconds[-1]


class Form:
    """The first steps of trainings that are made anew."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.training: Any = None
        self.explained: float | None = None

    def begin(self) -> dict[str, float]:
        """Processor seconds of a new step's first call."""
        self.training = None  # or two states were there
        made = self._make()
        training, self.explained = made if isinstance(made, tuple) else (made, None)
        self.training = training
        return {"start": first_call_seconds(training, 2)}

    def look(self) -> None:
        """Keeps what the training shows after its first steps."""
        self.program = Compiled(self.training.name)
        self.params = jax.tree.map(np.asarray, self.training.state["params"])

    def exact(self) -> dict[str, float]:
        """Megabytes, by quantity."""
        at_rest = bytes_on_a_device(self.training.state)
        sizes = {
            "at rest": at_rest,
            "peak": self.program.peak,
            "sent": self.program.sent,
        }
        return {quantity: size / 2**20 for quantity, size in sizes.items()}


@benchmark(
    dict(
        models=tuple(MODELS),
        devices=8,
        min_bytes=js.StateSharding().min_bytes,
        small=False,
        exact=False,
        starts=1,
        rounds=7,
        seconds=3.0,
    )
)
def sharded(args: Any) -> Iterator[Comparison]:
    """With `sharding=` a device keeps 1/N of the state, and steps cost no more.

    The same steps `replicated`, `sharded` (`"optimizer"` and `"state"`), and by
    `jax.jit` of the step on the whole batch with the state placed likewise, and
    gradients constrained. Of one device: bytes of the state at rest, the peak of memory
    as XLA tells, bytes sent in a step if devices stand in a ring (these are exact);
    processor seconds of the first call without its step; and the step.
    Parameters are compared with those of `replicated`, and the bytes sent with what
    `explain` says. `--small --min-bytes 512` compiles fast; `--exact` leaves out what
    takes time.
    """
    mesh = js.MirroredStrategy(js.simulate(args.devices)[: args.devices]).mesh
    for name in args.models:
        model = (SMALL if args.small else MODELS)[name]
        forms = {"replicated": Form(lambda m=model: with_sharding(m, mesh, None))}
        for kind in ("optimizer", "state"):
            sharding = js.StateSharding(kind, args.min_bytes)
            how = functools.partial(with_sharding, model, mesh, sharding)
            forms[kind] = Form(how)
            how = functools.partial(with_partitioner, model, mesh, kind, args.min_bytes)
            forms[f"jit {kind}"] = Form(how)
        rounds = 1 if args.exact else args.starts
        starts = in_turn({form: each.begin for form, each in forms.items()}, rounds)
        for form in forms.values():
            form.training.losses(2)  # two were taken when it began
            form.look()
        check_forms(name, forms)
        turns = {form: [each.exact()] for form, each in forms.items()}
        tables = [turns] if args.exact else [turns, starts]
        values = {
            quantity: {form: [n[quantity] for n in of] for form, of in table.items()}
            for table in tables
            for quantity in table["replicated"][0]
        }
        if not args.exact:
            bursts = {
                k: functools.partial(v.training.burst, 3) for k, v in forms.items()
            }
            values["step"] = scaled(in_turn(bursts, args.rounds, args.seconds), 1e3)
        units = {"start": "cpu s", "step": "ms"}
        for (quantity, of), kind in itertools.product(
            values.items(), ("optimizer", "state")
        ):
            pairs = {"sharded": kind, "replicated": "replicated", "jit": f"jit {kind}"}
            found = {label: of[form] for label, form in pairs.items()}
            unit, target = units.get(quantity, "MB"), target_of(quantity, kind, name)
            yield Comparison(name, f"{quantity}, {kind}", unit, found, target)


def target_of(quantity: str, kind: str, name: str) -> float:
    """How many times that of the replicated run it may be."""
    gathers_layers = kind == "state" and name.startswith("transformer")
    return {
        "at rest": {"optimizer": 0.45, "state": 0.14}[kind],
        "peak": 0.25 if gathers_layers else 1.0,
        # Layers are gathered for the backward pass, too; numbers such as norms besides.
        "sent": 1.51 if gathers_layers else 1.01,
        "start": 2.0,
        "step": 0.7,
    }[quantity]


def check_forms(name: str, forms: Mapping[str, Form]) -> None:
    """Prints a line a form, and ends when parameters or bytes are wrong."""
    wrong = []
    whole = jax.tree.leaves(forms["replicated"].params)
    largest = max(float(np.abs(leaf).max()) for leaf in whole)
    for form, each in forms.items():
        pairs = zip(jax.tree.leaves(each.params), whole, strict=True)
        apart = max(float(np.abs(a - b).max()) for a, b in pairs) / largest
        totals = collections.defaultdict[str, float](float)
        for kind, nbytes, _ in each.program.collectives:
            totals[kind] += nbytes
        moved = ", ".join(f"{k} {v / 2**20:.2f}" for k, v in sorted(totals.items()))
        equal = "equal bit by bit" if apart == 0 else f"apart by {apart:.1e}"
        said, sent = each.explained, each.program.sent
        text = "" if said is None else f"; explain: sends {said / 2**20:.2f} MB"
        print(f"{name}: {form}: {moved} MB; parameters {equal}{text}")
        is_explained = said is None or abs(said - sent) <= 0.01 * sent
        if apart > 1e-3 or not is_explained:
            wrong.append(form)
    if wrong:
        sys.exit(f"{name}: parameters or bytes are wrong of {', '.join(wrong)}")


# Meshes.


def divided_layers(units: int, rows: int) -> Task:
    """Pairs of layers: the first divides its results, the second its terms."""
    draw, wide = np.random.default_rng(0).normal, 4 * units
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

    return sgd_task(params, loss, rows, units)


@benchmark(
    dict(
        only=("shared-device", "first-call", "cores"),
        small=False,
        rounds=16,
        seconds=2.0,
    ),
    dict(only=("cores",), rounds=5, seconds=1.0),
)
def meshes(args: Any) -> Iterator[Comparison]:
    """Replicas of several devices, and several on a device, cost what they must.

    - shared-device: a step of 64 replicas that share one device, against one `jax.jit`
      of the step on all their rows. Each replica has a gradient of its own, which is
      written before all are added up: of a quarter of the rows that takes as long as
      the rest (1.8, not 1.1);
    - first-call: processor seconds of the first call without its step, of more and of
      fewer replicas on one device;
    - cores: a perceptron whose layers each replica divides over its devices, for R
      replicas of c devices, against `jax.jit` with the same placements: the step, bytes
      of the state on a device (exact), and gathers (exact; nothing needs them).

    The losses of all forms are compared after some steps. `--small` compiles fast.
    """
    devices = js.simulate(8)
    parts = {
        "shared-device": compare_shared_device,
        "first-call": compare_first_calls,
        "cores": compare_cores,
    }
    for part in args.only:
        yield from parts[part](devices, args)


def compare_steps(
    case: str, quantity: str, forms: Mapping[str, Training], target: float, args: Any
) -> Comparison:
    """Milliseconds of a step of forms whose losses are alike."""
    losses = {name: form.losses(4) for name, form in forms.items()}
    check_losses(case, losses, 1e-4)
    bursts = {k: lambda v=v: v.median_times(3)[1] for k, v in forms.items()}
    times = in_turn(bursts, args.rounds, args.seconds)
    return Comparison(case, quantity, "ms", scaled(times, 1e3), target)


def on_one_device(n: int, units: int, rows: int, device: Any) -> Training:
    """Training of replicas that share a device."""
    strategy = js.MirroredStrategy([device], replicas_per_device=n)
    return with_run(perceptron(4, units, rows), strategy)


def compare_shared_device(devices: Devices, args: Any) -> Iterator[Comparison]:
    """A step of many replicas on one device, against one step on all rows."""
    n, units, rows = (8, 32, 8) if args.small else (64, 256, 32)
    merged = with_jit(perceptron(4, units, n * rows), devices[:1])
    forms = {"replicas": on_one_device(n, units, rows, devices[0]), "merged": merged}
    case = f"perceptron, {n} replicas"
    yield compare_steps(case, "step, one device", forms, 1.5, args)


def compare_first_calls(devices: Devices, args: Any) -> Iterator[Comparison]:
    """Processor seconds of the first call without its step, of so many on a device."""

    def first_call(count: int) -> float:
        form = on_one_device(count, 32 if args.small else 64, 4, devices[0])
        jax.clear_caches()
        return first_call_seconds(form, 3)

    shared = (8,) if args.small else (8, 64, 512)
    first_call(1)  # whatever JAX does only once
    measures = {str(n): functools.partial(first_call, n) for n in (1, *shared)}
    times = in_turn(measures, 3)
    pairs = [(n, 1, 1.5) for n in shared] + [(n, 8, 1.1) for n in shared[1:]]
    for count, fewer, target in pairs:
        case = f"perceptron, {count} replicas on a device"
        found = {"replicas": times[str(count)], "fewer": times[str(fewer)]}
        yield Comparison(case, f"first call, to {fewer}", "cpu s", found, target)


def compare_cores(devices: Devices, args: Any) -> Iterator[Comparison]:
    """Milliseconds of a step, bytes of the state; nothing may be gathered."""
    units, rows = (32, 2) if args.small else (256, 8)
    specs = {"up": P(None, "core"), "down": P("core", None)}

    def placed(task: Task, mesh: Mesh) -> PyTree:
        """The state, divided over the devices of a replica."""
        where = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
        return [jax.device_put(each, where) for each in task.state()]

    for split in ((8, 1), (4, 2)) if args.small else ((8, 1), (4, 2), (2, 4), (1, 8)):
        case = f"{split[0]} x {split[1]}"
        task = divided_layers(units, 8 * rows // split[0])
        strategy = js.MirroredStrategy(devices, logical_axes={"core": split[1]})
        (batch,), step = task.batch(split[0]), named(task.step_with(all_reduce_mean))
        run = strategy.run(step, options=js.RunOptions(donate_argnums=0))
        state, rows_of = placed(task, strategy.mesh), strategy.per_replica(batch)
        forms = {"run": named_training(step, run, state, [rows_of])}
        # The same by one step on all rows, placed likewise, with JAX alone.
        mesh = Mesh(np.array(devices).reshape(split), ("replica", "core"))
        state, step = placed(task, mesh), named(task.step_with(unchanged))
        out = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
        split_rows = NamedSharding(mesh, P("replica"))
        rows_of = jax.device_put(batch.reshape(-1, units), split_rows)
        forms["jit"] = named_training(step, jitted, state, [rows_of])
        compared = compare_steps(case, "step", forms, 1.10, args)
        for name, form in forms.items():
            counts = collections.Counter[str]()
            for kind, _, times in Compiled(form.name).collectives:
                counts[kind] += times
            print(f"{case}: {name} has {dict(counts) or 'no collectives'}")
            if name == "run" and "all_gather" in counts:
                sys.exit(f"{case}: nothing needs an all-gather.")
        held = {k: [bytes_on_a_device(v.state) / 2**20] for k, v in forms.items()}
        yield Comparison(case, "state on a device", "MiB", held, 1.0)
        yield compared


BENCHMARKS = [sharded, meshes]

if __name__ == "__main__":
    main(BENCHMARKS)
