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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Comparison, benchmark, in_turn, main, median_seconds, scaled
from _training import (
    AXIS,
    RATE,
    Devices,
    Mean,
    PyTree,
    Training,
    all_reduce_mean,
    bytes_on_a_device,
    check_losses,
    unchanged,
)
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.tracing.explanation.compiled_program import compiled_collectives

# Makes weights whole where they are used. Told is of how many stacked ones these are.
Whole = Callable[[PyTree, int], PyTree]

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
        found = compiled_collectives(self._module[0].to_string(), replicas, __file__)
        return [(c.kind, c.seconds(links, "ring"), c.least_times) for c in found]

    @property
    def sent(self) -> float:
        return sum(nbytes for _, nbytes, _ in self.collectives)


# What is trained: as plain pytrees of arrays and as a `TrainState` of Flax.

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.01)
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large models and batches are; a perceptron has half as many layers."""

    layers: int = 8
    width: int = 128
    tokens: int = 512
    length: int = 32
    units: int = 512
    rows: int = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What plain JAX trains."""

    params: PyTree
    slots: PyTree

    def apply_gradients(self, grads: PyTree) -> State:
        updates, slots = OPTIMIZER.update(grads, self.slots, self.params)
        return State(optax.apply_updates(self.params, updates), slots)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and what it is trained on."""

    build: Callable[[jax.Array], Any]  # the state, of a random key
    # Of parameters, inputs, what is wanted of them, and what makes weights whole.
    loss: Callable[[PyTree, jax.Array, jax.Array, Whole], jax.Array]
    batch: Callable[[int], Sequence[np.ndarray]]
    takes_whole: bool = True  # whether `loss` asks for whole weights

    def step_with(
        self, mean: Mean, whole: Whole = lambda weights, _: weights
    ) -> Callable[..., Any]:
        """A new function for a step; `mean` is over replicas."""

        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            def loss_of(params: PyTree) -> jax.Array:
                return self.loss(params, x, y, whole)

            loss, grads = mean(jax.value_and_grad(loss_of)(state.params))
            return state.apply_gradients(grads=grads), loss

        return named(step)


def of_numbers(sizes: Sizes, replicas: int) -> Sequence[np.ndarray]:
    shape = (2, replicas, sizes.rows, sizes.units)
    return [*np.random.default_rng(1).normal(size=shape).astype(np.float32)]


def of_tokens(sizes: Sizes, replicas: int) -> Sequence[np.ndarray]:
    shape = (replicas, sizes.rows, sizes.length + 1)
    drawn = np.random.default_rng(1).integers(0, sizes.tokens, shape).astype(np.int32)
    return [drawn[..., :-1], drawn[..., 1:]]


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def plain_perceptron(sizes: Sizes) -> Model:
    """Square layers, in plain JAX."""
    units = sizes.units

    def build(key: jax.Array) -> State:
        keys = jax.random.split(key, sizes.layers // 2)
        kernels = [jax.random.normal(k, (units, units)) * units**-0.5 for k in keys]
        params = [{"kernel": each, "bias": jnp.zeros(units)} for each in kernels]
        return State(params, OPTIMIZER.init(params))

    def loss(params: PyTree, x: jax.Array, y: jax.Array, whole: Whole) -> jax.Array:
        for layer in params:
            weights = whole(layer, 1)
            x = jnp.tanh(x @ weights["kernel"] + weights["bias"])
        return jnp.mean((x - y) ** 2)

    return Model(build, loss, functools.partial(of_numbers, sizes))


def plain_transformer(sizes: Sizes) -> Model:
    """Stacked pre-norm layers through `lax.scan`, in plain JAX."""
    layers, width = sizes.layers, sizes.width
    shapes = {
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }

    def build(key: jax.Array) -> State:
        keys = iter(jax.random.split(key, len(shapes) + 3))

        def small(*shape: int) -> jax.Array:
            return 0.05 * jax.random.normal(next(keys), shape)

        stacked: dict[str, jax.Array] = {
            name: jax.random.normal(next(keys), shape) * shape[1] ** -0.5
            for name, shape in shapes.items()
        }
        norms = {
            f"{name} norm": jnp.ones((layers, width)) for name in ("first", "second")
        }
        params = {
            "embedding": small(sizes.tokens, width),
            "positions": small(sizes.length, width),
            "layers": stacked | norms,
            "norm": jnp.ones(width),
            "head": small(width, sizes.tokens),
        }
        return State(params, OPTIMIZER.init(params))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def loss(params: PyTree, x: jax.Array, y: jax.Array, whole: Whole) -> jax.Array:
        def body(x: jax.Array, layer: PyTree) -> tuple[jax.Array, None]:
            w = whole(layer, layers)
            x = x + attention(norm(x, w["first norm"]) @ w["qkv"]) @ w["out"]
            return x + nn.gelu(norm(x, w["second norm"]) @ w["up"]) @ w["down"], None

        rest = whole({k: v for k, v in params.items() if k != "layers"}, 1)
        out = rest["embedding"][x] + rest["positions"]
        out, _ = lax.scan(jax.checkpoint(body), out, params["layers"])
        return cross_entropy(norm(out, rest["norm"]) @ rest["head"], y)

    return Model(build, loss, functools.partial(of_tokens, sizes))


def attention(qkv: jax.Array) -> jax.Array:
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, 4, -1), 2, 0)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(*qkv.shape[:2], -1)


class Block(nn.Module):
    """One layer, for `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        out = attention(nn.Dense(3 * width)(nn.RMSNorm()(x)))
        x = x + nn.Dense(width)(out)
        out = nn.gelu(nn.Dense(4 * width)(nn.RMSNorm()(x)))
        return x + nn.Dense(width)(out), None


class Network(nn.Module):
    """Square layers; or Flax's `nn.scan` over `nn.remat` of layers of attention."""

    sizes: Sizes
    is_transformer: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = self.sizes
        if not self.is_transformer:
            for _ in range(sizes.layers // 2):
                x = jnp.tanh(nn.Dense(sizes.units)(x))
            return x
        x = nn.Embed(sizes.tokens, sizes.width)(x)
        stack: Any = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=sizes.layers,
        )
        return nn.Dense(sizes.tokens)(nn.RMSNorm()(stack()(x, None)[0]))


def in_flax(sizes: Sizes, is_transformer: bool) -> Model:
    """A `TrainState` of the same layers."""
    module = Network(sizes, is_transformer)
    batch = functools.partial(of_tokens if is_transformer else of_numbers, sizes)

    def build(key: jax.Array) -> TrainState:
        params = module.init(key, batch(1)[0][0])["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=OPTIMIZER)

    def loss(params: PyTree, x: jax.Array, y: jax.Array, _: Whole) -> jax.Array:
        out: Any = module.apply({"params": params}, x)
        return cross_entropy(out, y) if is_transformer else jnp.mean((out - y) ** 2)

    return Model(build, loss, batch, takes_whole=False)


MODELS: Mapping[str, Callable[[Sizes], Model]] = {
    "perceptron": plain_perceptron,
    "perceptron, Flax": functools.partial(in_flax, is_transformer=False),
    "transformer": plain_transformer,
    "transformer, Flax": functools.partial(in_flax, is_transformer=True),
}


# The forms.


def with_sharding(
    model: Model, mesh: Mesh, sharding: js.StateSharding | None
) -> tuple[Training, float]:
    """As a user of jaxstrategy writes it, and the bytes sent that `explain` tells."""
    strategy = js.MirroredStrategy(list(mesh.devices.flat), sharding=sharding)
    step = model.step_with(all_reduce_mean)
    batch = [strategy.per_replica(rows) for rows in model.batch(mesh.size)]
    state = strategy.init(model.build, jax.random.key(0))
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


def with_partitioner(model: Model, mesh: Mesh, kind: str, min_bytes: int) -> Training:
    """As an expert writes it for XLA's partitioner."""

    def placed(leaf: Any, size: int = min_bytes) -> NamedSharding:
        spec = spec_of(mesh.size, size, leaf.shape, leaf.dtype.itemsize)
        return NamedSharding(mesh, spec)

    everywhere = NamedSharding(mesh, P())
    types = jax.eval_shape(model.build, jax.random.key(0))
    shardings = jax.tree.map(placed, types)
    of_gradients = shardings.params
    if kind == "optimizer":
        whole_params = jax.tree.map(lambda _: everywhere, types.params)
        shardings = dataclasses.replace(shardings, params=whole_params)

    def constrained(loss_and_grads: PyTree) -> PyTree:
        loss, grads = loss_and_grads
        return loss, lax.with_sharding_constraint(grads, of_gradients)

    def gathered(weights: PyTree, stacked: int) -> PyTree:
        """Whole weights, whose gradients lie as the parts of these do."""
        size = min_bytes // stacked
        return jax.tree.map(lambda leaf: gather(leaf, placed(leaf, size)), weights)

    wholes = [gathered] if kind == "state" and model.takes_whole else []
    step = model.step_with(constrained, *wholes)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))
    rows = [x.reshape(-1, *x.shape[2:]) for x in model.batch(mesh.size)]
    batch = jax.device_put(rows, NamedSharding(mesh, P(AXIS)))
    state = jax.jit(model.build, out_shardings=shardings)(jax.random.key(0))
    return named_training(step, jitted, state, batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(leaf: jax.Array, own: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(leaf, NamedSharding(own.mesh, P()))


gather.defvjp(
    lambda leaf, own: (gather(leaf, own), None),
    lambda own, _, gradient: (lax.with_sharding_constraint(gradient, own),),
)


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
        seconds = []
        for _ in range(2):
            start = time.process_time()
            training.times()
            seconds.append(time.process_time() - start)
        self.training = training
        return {"start": seconds[0] - seconds[1]}

    def look(self) -> None:
        """Keeps what the training shows after its first steps."""
        self.program = Compiled(self.training.name)
        self.params = jax.tree.map(np.asarray, self.training.state.params)

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
    `jax.jit` of the step on the whole batch with the state placed likewise; in plain
    JAX the weights of a layer are gathered where it is computed, and their gradients
    constrained. Of one device: bytes of the state at rest, the peak of memory as XLA
    tells, bytes sent in a step if devices stand in a ring (these are exact); processor
    seconds of the first call without its step; and the step.
    Parameters are compared with those of `replicated`, and the bytes sent with what
    `explain` says. `--small --min-bytes 512` compiles fast; `--exact` leaves out what
    takes time.
    """
    mesh = js.MirroredStrategy(js.simulate(args.devices)[: args.devices]).mesh
    sizes = Sizes(2, 16, 32, 8, 32) if args.small else Sizes()
    for name in args.models:
        model = MODELS[name](sizes)
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
            found = {told: of[form] for told, form in pairs.items()}
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
        told = "" if said is None else f"; explain: sends {said / 2**20:.2f} MB"
        print(f"{name}: {form}: {moved} MB; parameters {equal}{told}")
        is_explained = said is None or abs(said - sent) <= 0.01 * sent
        if apart > 1e-3 or not is_explained:
            wrong.append(form)
    if wrong:
        sys.exit(f"{name}: parameters or bytes are wrong of {', '.join(wrong)}")


# Meshes.


def squares(units: int) -> tuple[PyTree, Callable[..., jax.Array], Any]:
    """Square layers; parameters, loss, and the shape of a row."""
    draw = np.random.default_rng(0).normal
    params = [draw(0, units**-0.5, (units, units)) for _ in range(4)]

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    return params, loss, (units,)


def divided_layers(units: int) -> tuple[PyTree, Callable[..., jax.Array], Any]:
    """Pairs of layers: the first divides its results, the second its terms."""
    draw = np.random.default_rng(0).normal
    wide = 4 * units
    pairs = [
        (draw(0, units**-0.5, (units, wide)), draw(0, wide**-0.5, (wide, units)))
        for _ in range(3)
    ]
    params = [{"up": up, "down": down} for up, down in pairs]

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        y = x
        for layer in params:
            y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
        return jnp.mean((y - 1) ** 2)

    return params, loss, (units,)


def momentum_step(loss: Callable[..., jax.Array], mean: Mean) -> Callable[..., Any]:
    """A new step of gradient descent with momentum, with a name of its own."""

    def step(state: PyTree, x: jax.Array) -> tuple[PyTree, jax.Array]:
        params, moments = state
        value, grads = mean(jax.value_and_grad(loss)(params, x))
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        params = jax.tree.map(lambda w, m: w - RATE / 2 * m, params, moments)
        return (params, moments), value

    return named(step)


def first_state(params: PyTree) -> PyTree:
    """Parameters and moments, on the host."""
    params = jax.tree.map(lambda w: w.astype(np.float32), params)
    return params, jax.tree.map(np.zeros_like, params)


def images(shape: Sequence[int], count: int) -> np.ndarray:
    found = np.random.default_rng(1).normal(size=(count, *shape))
    return found.astype(np.float32)


def ours(strategy: js.Strategy, loss: Any, state: PyTree, rows: np.ndarray) -> Training:
    """Training of a strategy; rows are `[replica, row, ...]`."""
    step = momentum_step(loss, all_reduce_mean)
    run = strategy.run(step, options=js.RunOptions(donate_argnums=0))
    return named_training(step, run, state, [strategy.per_replica(rows)])


@benchmark(
    dict(only=("lanes", "first-call", "cores"), small=False, rounds=16, seconds=2.0),
    dict(only=("cores",), rounds=5, seconds=1.0),
)
def meshes(args: Any) -> Iterator[Comparison]:
    """Replicas of several devices, and several on a device, cost what they must.

    - lanes: a step of 64 replicas that share one device, against one `jax.jit` of the
      step on all their rows. Each replica has a gradient of its own, which is written
      before all are added up: of a quarter of the rows that takes as long as the rest
      (1.8, not 1.1);
    - first-call: processor seconds of the first call without its step, of more and of
      fewer replicas on one device;
    - cores: a perceptron whose layers each replica divides over its devices, for R
      replicas of c devices, against `jax.jit` with the same placements: the step, bytes
      of the state on a device (exact), and gathers (exact; nothing needs them).

    The losses of all forms are compared after some steps. `--small` compiles fast.
    """
    devices = js.simulate(8)
    parts = {
        "lanes": compare_lanes,
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
    bursts = {k: functools.partial(median_times, v) for k, v in forms.items()}
    times = in_turn(bursts, args.rounds, args.seconds)
    return Comparison(case, quantity, "ms", scaled(times, 1e3), target)


def median_times(form: Training) -> float:
    return median_seconds(lambda: jax.block_until_ready(form.next()), 3)


def lanes(n: int, units: int, rows: int, device: Any) -> Training:
    """Training of replicas that share a device."""
    params, loss, shape = squares(units)
    strategy = js.MirroredStrategy([device], replicas_per_device=n)
    batch = images(shape, n * rows).reshape(n, rows, *shape)
    return ours(strategy, loss, strategy.mirror(first_state(params)), batch)


def compare_lanes(devices: Devices, args: Any) -> Iterator[Comparison]:
    """A step of many replicas on one device, against one step on all rows."""
    n, units, rows = (8, 32, 8) if args.small else (64, 256, 32)
    params, loss, shape = squares(units)
    step = momentum_step(loss, unchanged)
    state = jax.device_put(first_state(params), devices[0])
    batch = jax.device_put(images(shape, n * rows), devices[0])
    merged = named_training(step, jax.jit(step, donate_argnums=0), state, [batch])
    forms = {"lanes": lanes(n, units, rows, devices[0]), "merged": merged}
    case = f"perceptron, {n} replicas"
    yield compare_steps(case, "step, one device", forms, 1.5, args)


def compare_first_calls(devices: Devices, args: Any) -> Iterator[Comparison]:
    """Processor seconds of the first call without its step, of so many on a device."""

    def first_call(count: int) -> float:
        form = lanes(count, 32 if args.small else 64, 4, devices[0])
        jax.clear_caches()
        seconds = []
        for _ in range(3):
            start = time.process_time()
            jax.block_until_ready(form.next())
            seconds.append(time.process_time() - start)
        return seconds[0] - seconds[-1]

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
    params, loss, shape = divided_layers(units)

    def placed(mesh: Mesh) -> PyTree:
        """The state, divided over the devices of a replica."""

        def place(path: Any, leaf: np.ndarray) -> jax.Array:
            return jax.device_put(leaf, NamedSharding(mesh, specs[path[-1].key]))

        return jax.tree_util.tree_map_with_path(place, first_state(params))

    for split in ((8, 1), (4, 2)) if args.small else ((8, 1), (4, 2), (2, 4), (1, 8)):
        case, batch = f"{split[0]} x {split[1]}", images(shape, 8 * rows)
        strategy = js.MirroredStrategy(devices, logical_axes={"core": split[1]})
        per_replica = batch.reshape(split[0], -1, *shape)
        forms = {"run": ours(strategy, loss, placed(strategy.mesh), per_replica)}
        # The same by one step on all rows, placed likewise, with JAX alone.
        mesh = Mesh(np.array(devices).reshape(split), ("replica", "core"))
        state, step = placed(mesh), momentum_step(loss, unchanged)
        out = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
        split_rows = jax.device_put(batch, NamedSharding(mesh, P("replica")))
        forms["jit"] = named_training(step, jitted, state, [split_rows])
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
