"""Claim: modules and optimizers given to a step cost less than they do in `nnx.jit`.

One training step of a network, in four forms on one simulated CPU device:

- `run`: a function decorated with `strategy.run`, given a module and an optimizer;
- `nnx.jit`: the same function in Flax's own jit;
- `bind`: what `bind` of the first form returns, given the batch alone;
- `functional`: a function decorated with `strategy.run` that is given the arrays of
  both objects as a list, puts the objects together, and returns their new arrays.

The forms take turns in one process. Measured are

- host: the time until the call of a compiled step returns, the devices being idle;
- end to end: the same, and the wait for all that it changed.

A write to a variable costs `bind` about 0.1 us, whatever the size of its array: it is
held against the functional form end to end, on networks whose steps take milliseconds
as those of real ones do. It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import Comparison, add_options, in_turn, report
from flax import nnx

import jaxstrategy as js

# By quantity and pair of forms, the first of which is held against the second.
TARGETS = {("run", "nnx.jit"): 1.2, ("bind", "functional"): 1.1}

BURST = 5


class Dense(nnx.Module):
    """A small network: its steps cost the host more than the device."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(12)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Block(nnx.Module):
    """A block of a transformer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))


class Transformer(nnx.Module):
    """Some blocks."""

    def __init__(self, depth: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


# For each network how it is made, and the shape of its batch.
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "12 dense layers": (Dense, (8, 16)),
    "2-block transformer": (lambda: Transformer(2, 64), (8, 32, 64)),
    "12-block transformer": (lambda: Transformer(12, 128), (8, 64, 128)),
}


def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """One step."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


class Form:
    """A model, and one of the ways to train it.

    Args:
      name: of the way.
      network: which of `NETWORKS`.
    """

    def __init__(self, name: str, network: str) -> None:
        make, shape = NETWORKS[network]
        strategy = js.OneDeviceStrategy("CPU:0")
        self._model = make()
        self._optimizer = nnx.Optimizer(self._model, optax.adam(1e-3), wrt=nnx.Param)
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        self._x = jax.device_put(x, jax.NamedSharding(strategy.mesh, jax.P()))
        ways: dict[str, Callable[..., Callable[[], Any]]] = {
            "run": self._given,
            "bind": self._bound,
            "nnx.jit": self._jitted,
            "functional": self._functional,
        }
        self.step = ways[name](strategy)

    def _given(self, strategy: js.Strategy) -> Callable[[], Any]:
        step = strategy.run(train)
        return lambda: step(self._model, self._optimizer, self._x)

    def _bound(self, strategy: js.Strategy) -> Callable[[], Any]:
        step = strategy.run(train).bind(self._model, self._optimizer)
        return lambda: step(self._x)

    def _jitted(self, strategy: js.Strategy) -> Callable[[], Any]:
        step: Any = nnx.jit(train)
        return lambda: step(self._model, self._optimizer, self._x)

    def _functional(self, strategy: js.Strategy) -> Callable[[], Any]:
        graph, state = nnx.split([self._model, self._optimizer])
        self._leaves, structure = jax.tree.flatten(state)

        @strategy.run
        def step(leaves: list[jax.Array], x: jax.Array) -> Any:
            objects: Any = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            model, optimizer = objects
            loss = train(model, optimizer, x)
            return loss, jax.tree.leaves(nnx.state(objects))

        def call() -> Any:
            loss, self._leaves = step(self._leaves, self._x)
            return loss

        return call


def burst(form: Form, waits: bool) -> float:
    """The median time of a few steps, in microseconds."""
    times = []
    for _ in range(BURST):
        begun = time.perf_counter()
        loss = form.step()
        if waits:
            jax.block_until_ready(loss)
        times.append(time.perf_counter() - begun)
        jax.block_until_ready(loss)  # one program computes everything
    return 1e6 * statistics.median(times)


def compare(network: str, args: argparse.Namespace) -> list[Comparison]:
    """All forms of one training, in pairs."""
    names = [name for pair in TARGETS for name in pair]
    forms = {name: Form(name, network) for name in names}
    losses = [[float(form.step()) for _ in range(4)] for form in forms.values()]
    np.testing.assert_allclose(losses, losses[:1] * len(losses), rtol=1e-4)
    comparisons = []
    for quantity, waits in (("host", False), ("end to end", True)):
        measures = {
            name: functools.partial(burst, form, waits) for name, form in forms.items()
        }
        times = in_turn(measures, args.rounds, args.seconds)
        comparisons += [
            Comparison(
                network,
                f"{quantity}, {ours} to {theirs}",
                "us",
                {ours: times[ours], theirs: times[theirs]},
                target,
            )
            for (ours, theirs), target in TARGETS.items()
        ]
    return comparisons


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add_options(parser, rounds=60, seconds=60.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: first to second form")
    report((each for name in args.networks for each in compare(name, args)), args)


if __name__ == "__main__":
    main()
