"""Claim: with `sharding=` a device keeps 1/N of the state, and steps cost no more.

Perceptrons and transformers (Flax and plain JAX, Optax with a clip by the global norm
and AdamW) take the same steps on simulated CPU devices, as

- `replicated`: a function decorated with `strategy.run` of a `MirroredStrategy`;
- `sharded`: the same function with `sharding=js.StateSharding("optimizer")`, and with
  `"state"`;
- `jit`: `jax.jit` by hand of the step on the whole batch, the same arrays placed by
  `NamedSharding`; with the state sharded, the whole weights of a layer are asked for
  where it is computed, and their gradients constrained to lie as they do: XLA finds the
  collectives. That of a Flax model is the plain step, its state placed likewise.

Measured are, on one device,

- at rest: bytes of the state after a step;
- peak: arguments + results - donated + temporary memory, by XLA's memory analysis;
- sent: bytes that a device sends in a step, if the devices stand in a ring, of the
  collectives in the compiled program, turns of loops counted;
- start: processor seconds of all threads for the first call without its step, of which
  compile is XLA's part;
- step: milliseconds of a training step, in turns.

The first three are exact, the others are medians (quartiles); ratios are to
`replicated`. The parameters after some steps are compared with those of `replicated`,
and the bytes sent with what `explain` says.
It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from _compiled import Compiled, compiled
from _sharded_models import MODELS, SMALL, Model, Sizes, as_they_are
from _timing import Comparison, add_options, in_turn, report
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any

AXIS = "replica"
KINDS = ("optimizer", "state")
UNITS = {"start": "cpu s", "compile": "cpu s", "step": "ms"}
# Steps whose parameters are compared; and those that are timed at once.
COMPARED, BURST = 4, 3
# How far parameters may be from the replicated ones, as part of the largest.
TOLERANCE = 1e-3
# How far the bytes that `explain` tells may be from those of the compiled program.
EXPLAINED = 0.01
SECONDS = 60.0

DEFAULTS = ("perceptron", "perceptron, Flax", "transformer", "transformer, Flax")
WITH_REMAT = ("transformer", "transformer, Flax")
SCANNED = (*WITH_REMAT, "transformer, no remat")
AT_REST = {"optimizer": 0.45, "state": 0.14}
# Numbers such as norms are reduced besides.
SENT, SENT_TWICE = 1.01, 1.51
PEAK, START, STEP = 0.25, 2.0, 0.7


def target(quantity: str, kind: str, name: str) -> float:
    """How many times that of the replicated run it may be."""
    gathers_layers = kind == "state" and name in SCANNED
    return {
        "at rest": AT_REST[kind],
        "peak": PEAK if gathers_layers and name in WITH_REMAT else 1.0,
        # Layers are gathered for the backward pass, too.
        "sent": SENT_TWICE if gathers_layers else SENT,
        "start": START,
        "compile": START,
        "step": STEP,
    }[quantity]


# The forms.

_numbers = itertools.count()


@dataclasses.dataclass
class Training:
    """A training loop with one form of the step.

    Attributes:
      name: the step's, unlike any other.
      step: it; the state is donated.
      state: the next step's.
      batch: of each step.
      explain: explains it, of arguments; None where nothing can.
    """

    name: str
    step: Callable[..., Any]
    state: Any
    batch: tuple[jax.Array, jax.Array]
    explain: Callable[..., js.profiling.Explanation] | None = None

    def next(self) -> jax.Array:
        """The loss of one more step."""
        self.state, loss = self.step(self.state, *self.batch)
        return loss

    def wait(self) -> float:
        """Takes one more step; processor seconds of all threads."""
        start = time.process_time()
        jax.block_until_ready((self.next(), self.state))
        return time.process_time() - start

    def burst(self) -> float:
        """Milliseconds for each of some steps."""
        start = time.perf_counter()
        for _ in range(BURST - 1):
            self.next()
        jax.block_until_ready((self.next(), self.state))
        return 1e3 * (time.perf_counter() - start) / BURST


def named(step: Callable[..., Any]) -> str:
    """Gives a step a name of its own."""
    step.__name__ = f"step{next(_numbers)}"
    return step.__name__


def with_run(model: Model, mesh: Mesh, sharding: js.StateSharding | None) -> Training:
    """As a user of jaxstrategy writes it."""
    strategy = js.MirroredStrategy(list(mesh.devices.flat), sharding=sharding)

    def mean(tree: PyTree) -> PyTree:
        return js.get_replica_context().all_reduce("mean", tree)

    step = model.step_with(mean)
    name = named(step)
    x, y = model.batch(mesh.size)
    batch = strategy.per_replica({"x": x, "y": y})
    state = strategy.init(model.build, jax.random.key(0))
    run = strategy.run(step, options=js.RunOptions(donate_argnums=0))
    explain = functools.partial(strategy.explain, run, compiled=False)
    return Training(name, run, state, (batch["x"], batch["y"]), explain)


def by_hand(model: Model, mesh: Mesh, kind: str, min_bytes: int) -> Training:
    """As an expert writes it for XLA's partitioner."""
    specs = functools.partial(_spec, mesh.size, min_bytes)
    types = jax.eval_shape(model.build, jax.random.key(0))
    divided = jax.tree.map(lambda leaf: specs(leaf.shape, leaf.dtype.itemsize), types)
    of_gradients = _placed(mesh, divided.params)
    if kind == "optimizer":
        whole_params = jax.tree.map(lambda _: P(), divided.params)
        divided = dataclasses.replace(divided, params=whole_params)

    def constrained(loss_and_grads: PyTree) -> PyTree:
        loss, grads = loss_and_grads
        return loss, lax.with_sharding_constraint(grads, of_gradients)

    whole = as_they_are
    if kind == "state" and model.takes_whole:
        whole = functools.partial(_gathered, mesh, min_bytes)
    step = model.step_with(constrained, whole)
    name = named(step)
    shardings = _placed(mesh, divided)
    everywhere = NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))
    x, y = (rows.reshape(-1, *rows.shape[2:]) for rows in model.batch(mesh.size))
    batch = jax.device_put((x, y), NamedSharding(mesh, P(AXIS)))
    state = jax.jit(model.build, out_shardings=shardings)(jax.random.key(0))
    return Training(name, jitted, state, batch)


def _spec(parts: int, min_bytes: int, shape: tuple[int, ...], itemsize: int) -> P:
    """The longest dimension that can be divided is; that of layers is not."""
    if math.prod(shape) * itemsize < max(min_bytes, 1):
        return P()
    longest = max(
        (dimension for dimension, length in enumerate(shape) if length % parts == 0),
        key=lambda dimension: (shape[dimension], dimension),
        default=None,
    )
    return P() if longest is None else P(*[None] * longest, AXIS)


def _placed(mesh: Mesh, specs: PyTree) -> PyTree:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )


def _gathered(mesh: Mesh, min_bytes: int, weights: PyTree, stacked: int) -> PyTree:
    """Whole weights, whose gradients lie as the parts of these do."""

    def whole(leaf: jax.Array) -> jax.Array:
        size = leaf.dtype.itemsize
        spec = _spec(mesh.size, min_bytes // stacked, leaf.shape, size)
        return _whole(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(whole, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _whole(leaf: jax.Array, own: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(leaf, NamedSharding(own.mesh, P()))


def _whole_forward(leaf: jax.Array, own: NamedSharding) -> tuple[jax.Array, None]:
    return _whole(leaf, own), None


def _whole_backward(
    own: NamedSharding, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, own),)


_whole.defvjp(_whole_forward, _whole_backward)


def forms(
    model: Model, mesh: Mesh, min_bytes: int
) -> dict[str, Callable[[], Training]]:
    """What makes each form anew."""
    made = {"replicated": functools.partial(with_run, model, mesh, None)}
    for kind in KINDS:
        sharding = js.StateSharding(kind, min_bytes)
        made[kind] = functools.partial(with_run, model, mesh, sharding)
        made[f"jit {kind}"] = functools.partial(by_hand, model, mesh, kind, min_bytes)
    return made


# What is measured.


class Clock:
    """Processor seconds that XLA compiles, by the name of the function."""

    def __init__(self) -> None:
        self._begun = 0.0
        self.seconds: dict[str, float] = {}
        jax.monitoring.register_event_duration_secs_listener(self._replies)

    def _replies(self, event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs  # on the clock
        if event.endswith("/jaxpr_to_mlir_module_duration"):
            self._begun = time.process_time()
        if event.endswith("/backend_compile_duration"):
            name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
            self.seconds[name] = time.process_time() - self._begun


@dataclasses.dataclass
class Beginnings:
    """The first steps of trainings that are made anew.

    Attributes:
      make: makes one.
      clock: of XLA's time.
      training: the last one made.
    """

    make: Callable[[], Training]
    clock: Clock
    training: Training | None = None

    def begin(self) -> dict[str, float]:
        """Processor seconds of a new step's first call, and XLA's part of them."""
        self.training = None  # or two states were there
        training = self.make()
        first = training.wait()
        seconds = first - training.wait()
        self.training = training
        return {"start": seconds, "compile": self.clock.seconds[training.name]}


@dataclasses.dataclass(frozen=True)
class Found:
    """The exact part of what is known of a form.

    Attributes:
      numbers: megabytes, by quantity.
      params: after some steps, on the host.
      program: the compiled step.
      explained: bytes that a device sends by `explain`, None where it cannot say.
    """

    numbers: Mapping[str, float]
    params: PyTree
    program: Compiled
    explained: float | None

    @classmethod
    def of(cls, training: Training) -> Found:
        """What a training shows after its first steps."""
        program = compiled(training.name)
        state = training.state
        numbers = {
            "at rest": bytes_on_a_device(state) / 2**20,
            "peak": program.peak / 2**20,
            "sent": program.sent / 2**20,
        }
        params = jax.tree.map(np.asarray, state.params)
        return cls(numbers, params, program, explained_bytes(training))

    def difference(self, other: Found) -> float:
        """The largest of two trainings' parameters, as part of the largest of these."""
        ours, theirs = jax.tree.leaves(self.params), jax.tree.leaves(other.params)
        pairs = zip(ours, theirs, strict=True)
        apart = max(float(np.abs(a - b).max()) for a, b in pairs)
        return apart / max(float(np.abs(leaf).max()) for leaf in theirs)


def explained_bytes(training: Training) -> float | None:
    """The bytes that a device sends in a step, by `explain`, if devices form a ring."""
    if training.explain is None:
        return None
    found = training.explain((training.state, *training.batch))
    a_byte_a_second = js.profiling.Topology(1.0, 0.0, found.num_replicas)
    return found.communication_time(a_byte_a_second, "ring")


def bytes_on_a_device(tree: PyTree) -> int:
    """Of all arrays, on the first device that has a part of each."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def print_findings(name: str, of: Mapping[str, Found]) -> None:
    """A line a form: its collectives, and its parameters; ends when these are wrong."""
    wrong = []
    for form, each in of.items():
        apart = each.difference(of["replicated"])
        moved = ", ".join(
            f"{kind} {nbytes / 2**20:.2f}"
            for kind, nbytes in sorted(each.program.whole_by_kind().items())
        )
        equal = "equal bit by bit" if apart == 0 else f"apart by {apart:.1e}"
        said = each.explained
        sent = each.program.sent
        told = "" if said is None else f"; explain: sends {said / 2**20:.2f} MB"
        print(f"{name}: {form}: {moved} MB; parameters {equal}{told}")
        is_explained = said is None or abs(said - sent) <= EXPLAINED * sent
        if apart > TOLERANCE or not is_explained:
            wrong.append(form)
    if wrong:
        sys.exit(f"{name}: parameters or bytes are wrong of {', '.join(wrong)}")


Values = Mapping[str, Mapping[str, Sequence[float]]]


def comparisons(name: str, values: Values) -> list[Comparison]:
    """Of both kinds, for what was measured by quantity and form."""
    return [
        Comparison(
            name,
            f"{quantity}, {kind}",
            UNITS.get(quantity, "MB"),
            {
                "sharded": by_form[kind],
                "replicated": by_form["replicated"],
                "jit": by_form[f"jit {kind}"],
            },
            target(quantity, kind, name),
        )
        for quantity, by_form in values.items()
        for kind in KINDS
    ]


def measured(
    name: str, args: argparse.Namespace, mesh: Mesh, clock: Clock
) -> list[Comparison]:
    """All that was asked for of one model."""
    model = MODELS[name](SMALL if args.small else Sizes())
    made = {
        form: Beginnings(make, clock)
        for form, make in forms(model, mesh, args.min_bytes).items()
    }
    starts = in_turn(
        {form: each.begin for form, each in made.items()},
        1 if args.exact else args.starts,
    )
    trainings = {form: each.training for form, each in made.items() if each.training}
    for training in trainings.values():
        for _ in range(COMPARED - 2):  # two were taken when it began
            training.wait()
    found = {form: Found.of(training) for form, training in trainings.items()}
    print_findings(name, found)
    values = by_quantity({form: [each.numbers] for form, each in found.items()})
    if not args.exact:
        values |= by_quantity(starts)
        bursts = {form: training.burst for form, training in trainings.items()}
        values["step"] = in_turn(bursts, args.rounds, args.seconds)
    return comparisons(name, values)


def by_quantity(
    by_form: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Mapping[str, Sequence[float]]]:
    """Numbers of each form at each turn, by quantity and form."""
    quantities = next(iter(by_form.values()))[0]
    return {
        quantity: {
            form: [numbers[quantity] for numbers in turns]
            for form, turns in by_form.items()
        }
        for quantity in quantities
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=DEFAULTS)
    add("--devices", type=int, default=8)
    add(
        "--min-bytes",
        type=int,
        default=js.StateSharding().min_bytes,
        help="see js.StateSharding",
    )
    add(
        "--small",
        action="store_true",
        help="models that compile fast (try --min-bytes 512)",
    )
    add("--exact", action="store_true", help="nothing that takes time")
    add("--starts", type=int, default=3, help="first calls")
    add_options(parser, rounds=30, seconds=SECONDS)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    mesh = js.MirroredStrategy(js.simulate(args.devices)[: args.devices]).mesh
    about = {"jax": jax.__version__, "machine": platform.machine()}
    print(f"{about}; {args.devices} devices; ratio: to replicated")
    clock = Clock()
    models = (measured(name, args, mesh, clock) for name in args.models)
    report(itertools.chain.from_iterable(models), args)


if __name__ == "__main__":
    main()
