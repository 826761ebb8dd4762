"""Claim: proving what is mirrored is right, exact and cheap.

- time: the replication analysis of a transformer's training step takes at most a tenth
  of the time that JAX takes to trace it, in proportion to the number of blocks;
- precision: parameters, optimizer state and reduced metrics of real models are all
  proved mirrored;
- soundness: of random programs, every result called mirrored is the same on all
  replicas, bit by bit.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from _timing import Comparison, add_options, in_turn, report
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.tracing.replication.rules import analyse

PyTree = Any

AXIS = "replica"
SHARE = 0.10
VARIANTS = ("loop", "scan", "jit", "remat")
PARTS = ("time", "precision", "soundness")


# Training steps.


class Block(nn.Module):
    """Attention and a perceptron, each with a normalisation and a residual."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
        y = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class ScannedBlock(nn.Module):
    """A block as the body of a scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block()(x), None


class Transformer(nn.Module):
    """Blocks in one of several `VARIANTS`."""

    blocks: int
    variant: str = "loop"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.variant == "scan":
            body = nn.scan(
                ScannedBlock,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.blocks,
            )
            return body()(x, None)[0]
        wrap = {"loop": lambda block: block, "jit": nn.jit, "remat": nn.remat}
        block = wrap[self.variant](Block)
        for _ in range(self.blocks):
            x = block()(x)
        return x


class Perceptron(nn.Module):
    """Dropout between dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(x.shape[-1])(x)


class Convolutional(nn.Module):
    """Convolutions, with batch statistics over all replicas."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3,))(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=AXIS)(x)
        return nn.Conv(8, (3,))(nn.max_pool(nn.relu(x), (2,), (2,)))


class Recurrent(nn.Module):
    """A long short-term memory."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.RNN(nn.LSTMCell(8))(x)


class Embedded(nn.Module):
    """Tokens, found in the input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = jnp.abs(x[..., 0] * 10).astype(jnp.int32) % 16
        return Transformer(1)(nn.Embed(16, 8)(tokens))


MODELS: Mapping[str, nn.Module] = {
    "perceptron, dropout": Perceptron(),
    "convolutions, batch norm": Convolutional(),
    "LSTM": Recurrent(),
    "embedding, transformer": Embedded(),
    **{f"transformer, {kind}": Transformer(2, kind) for kind in VARIANTS},
}
OPTIMIZERS: Mapping[str, optax.GradientTransformation] = {
    "adam": optax.adam(1e-3),
    "clipped adamw, scheduled": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
    ),
    "adafactor": optax.adafactor(1e-3),
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-3),
    "adam in steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "adam if finite": optax.apply_if_finite(optax.adam(1e-3), 5),
    "injected sgd": optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9),
    "masked, averaged": optax.chain(
        optax.masked(optax.add_decayed_weights(1e-4), lambda tree: tree_of(True, tree)),
        optax.ema(0.9),
    ),
    "d-adapted adamw": optax.contrib.dadapt_adamw(1e-3),
    "prodigy": optax.contrib.prodigy(1e-3),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
}


def tree_of(leaf: Any, tree: PyTree) -> PyTree:
    """`leaf` for each leaf of `tree`."""
    return jax.tree.map(lambda _: leaf, tree)


@dataclasses.dataclass(frozen=True)
class Training:
    """One replica's step of a model with an optimizer."""

    model: nn.Module
    optimizer: optax.GradientTransformation

    def state(self) -> PyTree:
        """The shapes of all variables and of the optimizer's state."""

        def build(key: jax.Array) -> PyTree:
            variables = self._init(key)
            return variables, self.optimizer.init(variables["params"])

        return jax.eval_shape(build, jax.random.key(0))

    def _init(self, key: jax.Array) -> PyTree:
        # `init` does not bind the axis of the batch statistics.
        init = jax.vmap(
            lambda x: self.model.init({"params": key, "dropout": key}, x),
            axis_name=AXIS,
            out_axes=None,
        )
        return init(jnp.zeros((1, 2, 4, 8)))

    def step(self, state: PyTree, batch: jax.Array, key: jax.Array) -> PyTree:
        """The state after one more batch, and the mean loss."""
        variables, optimizer_state = state
        others = {name: v for name, v in variables.items() if name != "params"}
        key = jax.random.fold_in(key, lax.axis_index(AXIS))

        def loss_of(params: PyTree) -> tuple[jax.Array, PyTree]:
            out, updated = self.model.apply(
                {"params": params, **others},
                batch,
                rngs={"dropout": key},
                mutable=list(others),
            )
            return jnp.mean(out**2), updated

        params = variables["params"]
        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        grads, loss = lax.pmean((grads, loss), AXIS)
        updates, optimizer_state = self.optimizer.update(grads, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        return ({"params": params, **others}, optimizer_state), loss


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
      jaxpr: one replica's computation.
      varies: for each input, whether it differs between replicas.
      seconds: how long JAX took.
    """

    jaxpr: Any
    varies: Sequence[bool]
    seconds: float

    def analysed(self, replicas: int) -> tuple[float, list[bool]]:
        """The seconds of the analysis, and whether each result varies."""
        start = time.perf_counter()
        findings = analyse(self.jaxpr, self.varies, AXIS, replicas)
        seconds = time.perf_counter() - start
        outputs = findings.outputs
        return seconds, [state is not None and state.varies for state in outputs]


def traced(training: Training, state: PyTree, mesh: jax.sharding.Mesh) -> Trace:
    """What JAX makes of a new function that does the step of `training`."""
    step = jax.shard_map(
        lambda *args: training.step(*args),
        mesh=mesh,
        in_specs=(P(), P(AXIS), P()),
        out_specs=P(),
        check_vma=False,
    )
    batch = jax.ShapeDtypeStruct((2 * mesh.size, 4, 8), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.clear_caches()
    start = time.perf_counter()
    outer = jax.make_jaxpr(step)(state, batch, key)
    seconds = time.perf_counter() - start
    (eqn,) = outer.jaxpr.eqns
    varies = [spec != P() for spec in eqn.params["in_specs"]]
    return Trace(eqn.params["jaxpr"], varies, seconds)


# Time.


def compare_times(
    cases: Sequence[tuple[str, int]], mesh: jax.sharding.Mesh, args: argparse.Namespace
) -> Iterator[Comparison]:
    """The analysis beside the tracing of transformers of these variants and sizes."""

    def both(training: Training, state: PyTree) -> tuple[float, float]:
        trace = traced(training, state, mesh)
        return trace.analysed(mesh.size)[0], trace.seconds

    for variant, blocks in cases:
        training = Training(Transformer(blocks, variant), optax.adam(1e-3))
        state = training.state()
        traces = {"both": lambda t=training, s=state: both(t, s)}
        turns = in_turn(traces, args.rounds, args.seconds)
        analysis, tracing = zip(*turns["both"], strict=True)
        values = {
            "analysis": [1e3 * seconds for seconds in analysis],
            "tracing": [1e3 * seconds for seconds in tracing],
        }
        case = f"{blocks} blocks, {variant}"
        yield Comparison(case, "time", "ms", values, SHARE)


# Precision.


def count_mirrored(
    training: Training, mesh: jax.sharding.Mesh
) -> tuple[int, Sequence[bool]]:
    """How many results must be mirrored, and whether each is."""
    _, varies = traced(training, training.state(), mesh).analysed(mesh.size)
    return len(varies), [not each for each in varies]


def check_precision(mesh: jax.sharding.Mesh) -> Iterator[Comparison]:
    """Prints a line for each model and optimizer, of how many are as they must be."""
    pairs = [(model, "adam") for model in MODELS]
    pairs += [("perceptron, dropout", name) for name in OPTIMIZERS if name != "adam"]
    for model, optimizer in pairs:
        training = Training(MODELS[model], OPTIMIZERS[optimizer])
        wanted, mirrored = count_mirrored(training, mesh)
        print(f"{model}; {optimizer}: {sum(mirrored)} of {wanted} mirrored")
        counts = {"must be": [wanted], "proved": [sum(mirrored)]}
        yield Comparison(f"{model}; {optimizer}", "mirrored results", "", counts, 1.0)


# Soundness.

Operation = Callable[[jax.Array, jax.Array], jax.Array]


def _written(a: jax.Array, b: jax.Array) -> jax.Array:
    ref = jax.new_ref(a)

    def turn(_: Any, carry: jax.Array) -> jax.Array:
        seen = ref[...]
        ref[...] = b
        return carry + seen

    return lax.fori_loop(0, 2, turn, b) + ref[...]


OPERATIONS: Sequence[Operation] = (
    lambda a, b: a + b,
    lambda a, b: jnp.where(a > 0.3, b, b + 1.0),
    lambda a, b: jnp.sin(b)[::-1],
    lambda a, b: lax.psum(a, AXIS),
    lambda a, b: lax.pmean(b, AXIS),
    lambda a, b: lax.pmax(a, AXIS, axis_index_groups=[[0, 1], [2, 3]]),
    lambda a, b: lax.ppermute(a, AXIS, [(0, 2), (1, 0)]),
    lambda a, b: lax.all_gather(a, AXIS).mean(0),
    lambda a, b: lax.psum_scatter(jnp.tile(a, (4, 1)), AXIS),
    lambda a, b: a * lax.axis_index(AXIS),
    lambda a, b: lax.cond(a[0] > 0.3, lambda: b, lambda: b * 2.0),
    lambda a, b: lax.scan(lambda c, x: (c + b, c), a, None, length=2)[0],
    lambda a, b: lax.fori_loop(0, 2, lambda _, c: (c[1], a), (b, b))[0],
    lambda a, b: jax.grad(lambda v: jnp.sum(jnp.tanh(v) * a))(b),
    lambda a, b: jax.checkpoint(lambda v: jnp.cos(v) * a)(b),
    lambda a, b: b.at[jnp.int32(a[0]) % 2].add(1.0),
    _written,
)


def random_program(draw: random.Random) -> Callable[..., list[jax.Array]]:
    """A function of a varying and a mirrored value with a few operations."""
    twice = [jax.jit(operation) for operation in OPERATIONS]
    chosen = [draw.choice((*OPERATIONS, *twice)) for _ in range(draw.randint(3, 9))]
    picks = [(draw.random(), draw.random()) for _ in chosen]

    def step(x: jax.Array, s: jax.Array) -> list[jax.Array]:
        known = [x, s]
        for operation, pair in zip(chosen, picks, strict=True):
            a, b = (known[int(pick * len(known))] for pick in pair)
            known.append(operation(a, b))
        return known

    return step


def check_soundness(strategy: js.MirroredStrategy, programs: int) -> None:
    """Runs random programs; ends this one unless all that is called mirrored is."""
    draw = random.Random(0)
    x = strategy.per_replica([np.array([0.1, 0.7], np.float32) * i for i in range(4)])
    s = jnp.array([0.2, 0.4])
    mirrored = violations = outputs = refused = 0
    for _ in range(programs):
        try:
            with warnings.catch_warnings(action="ignore"):
                results = strategy.run(random_program(draw), (x, s))
        except js.errors.DivergentCollectiveError:
            refused += 1
            continue
        for result in results:
            outputs += 1
            if isinstance(result, js.PerReplica):
                continue
            mirrored += 1
            first, *copies = (np.asarray(each.data) for each in _shards(result))
            violations += any(copy.tobytes() != first.tobytes() for copy in copies)
    print(
        f"soundness: {programs} programs, {refused} refused, {outputs} outputs, "
        f"{mirrored} called mirrored, {violations} of them differ"
    )
    if violations:
        sys.exit("The analysis is wrong.")


def _shards(array: jax.Array) -> Sequence[Any]:
    return array.addressable_shards


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All that was asked for."""
    strategy = js.MirroredStrategy(js.simulate(4))
    if "precision" in args.only:
        yield from check_precision(strategy.mesh)
    if "soundness" in args.only:
        check_soundness(strategy, args.programs)
    if "time" in args.only:
        cases = [("loop", blocks) for blocks in args.blocks]
        cases += [(variant, max(args.blocks)) for variant in VARIANTS[1:]]
        yield from compare_times(cases, strategy.mesh, args)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--blocks", type=int, nargs="+", default=[6, 12, 24])
    add("--programs", type=int, default=200, help="random ones")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="what is checked")
    add_options(parser, rounds=5, seconds=20.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: analysis to tracing")
    report(measure(args), args)


if __name__ == "__main__":
    main()
