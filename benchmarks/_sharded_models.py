"""What `sharded.py` trains: models with parameters by the megabyte, and their steps.

Each as plain pytrees of arrays and as a `TrainState` of Flax.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

PyTree = Any
# Makes weights whole where they are used. Told is of how many stacked ones these are.
Whole = Callable[[PyTree, int], PyTree]

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.01)
)
HEADS = 4


def as_they_are(weights: PyTree, stacked: int) -> PyTree:
    """Weights that already are whole."""
    del stacked
    return weights


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large models and batches are.

    Attributes:
      layers: of a transformer; a perceptron has half as many.
      width: of a transformer.
      tokens: how many there are.
      length: of a row of tokens.
      units: of a perceptron.
      rows: of each replica.
    """

    layers: int = 8
    width: int = 128
    tokens: int = 512
    length: int = 32
    units: int = 512
    rows: int = 2


SMALL = Sizes(layers=2, width=16, tokens=32, length=8, units=32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What plain JAX trains."""

    params: PyTree
    slots: PyTree

    def apply_gradients(self, grads: PyTree) -> State:
        """The state after one update."""
        updates, slots = OPTIMIZER.update(grads, self.slots, self.params)
        return State(optax.apply_updates(self.params, updates), slots)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and what it is trained on.

    Attributes:
      build: makes the state, of a random key.
      loss: of parameters, inputs and what is wanted of them, on some rows.
      batch: inputs and what is wanted, `[replica, row, ...]`, for so many replicas.
      takes_whole: whether `loss` asks its last argument for whole weights.
    """

    build: Callable[[jax.Array], Any]
    loss: Callable[[PyTree, jax.Array, jax.Array, Whole], jax.Array]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]
    takes_whole: bool = True

    def step_with(
        self, mean: Callable[[PyTree], PyTree], whole: Whole = as_they_are
    ) -> Callable[..., Any]:
        """A new function for a step; `mean` is over replicas."""

        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            def loss_of(params: PyTree) -> jax.Array:
                return self.loss(params, x, y, whole)

            loss, grads = mean(jax.value_and_grad(loss_of)(state.params))
            return state.apply_gradients(grads=grads), loss

        return step


# Perceptrons.


def perceptron(sizes: Sizes) -> Model:
    """Square layers, in plain JAX."""
    layers, units = sizes.layers // 2, sizes.units

    def build(key: jax.Array) -> State:
        params = [
            {
                "kernel": jax.random.normal(one, (units, units)) * units**-0.5,
                "bias": jnp.zeros(units),
            }
            for one in jax.random.split(key, layers)
        ]
        return State(params, OPTIMIZER.init(params))

    def loss(params: PyTree, x: jax.Array, y: jax.Array, whole: Whole) -> jax.Array:
        for layer in params:
            weights = whole(layer, 1)
            x = jnp.tanh(x @ weights["kernel"] + weights["bias"])
        return jnp.mean((x - y) ** 2)

    return Model(build, loss, functools.partial(_numbers, sizes))


class Perceptron(nn.Module):
    """The same in Flax."""

    layers: int
    units: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = jnp.tanh(nn.Dense(self.units)(x))
        return x


def flax_perceptron(sizes: Sizes) -> Model:
    """A `TrainState` of square layers."""
    module = Perceptron(sizes.layers // 2, sizes.units)

    def loss(params: PyTree, x: jax.Array, y: jax.Array, _: Whole) -> jax.Array:
        out = module.apply({"params": params}, x)
        assert isinstance(out, jax.Array)
        return jnp.mean((out - y) ** 2)

    example = jnp.zeros((1, sizes.units))
    build = functools.partial(_train_state, module, example)
    return Model(build, loss, functools.partial(_numbers, sizes), takes_whole=False)


# Transformers.


def transformer(sizes: Sizes, remat: bool = True, is_scanned: bool = True) -> Model:
    """Stacked pre-norm layers through `lax.scan`, in plain JAX.

    Args:
      sizes: of it.
      remat: whether layers are computed again for the backward pass.
      is_scanned: whether the layers are in a `lax.scan`, or in a loop in Python.
    """
    layers, width = sizes.layers, sizes.width
    shapes = {
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }

    def build(key: jax.Array) -> State:
        keys = iter(jax.random.split(key, len(shapes) + 3))
        stacked: dict[str, jax.Array] = {
            name: jax.random.normal(next(keys), shape) * shape[1] ** -0.5
            for name, shape in shapes.items()
        }
        norms = {
            f"{name} norm": jnp.ones((layers, width)) for name in ("first", "second")
        }
        params = {
            "embedding": 0.05 * jax.random.normal(next(keys), (sizes.tokens, width)),
            "positions": 0.05 * jax.random.normal(next(keys), (sizes.length, width)),
            "layers": stacked | norms,
            "norm": jnp.ones(width),
            "head": 0.05 * jax.random.normal(next(keys), (width, sizes.tokens)),
        }
        return State(params, OPTIMIZER.init(params))

    def loss(params: PyTree, x: jax.Array, y: jax.Array, whole: Whole) -> jax.Array:
        def body(x: jax.Array, layer: PyTree) -> tuple[jax.Array, None]:
            return _block(whole(layer, layers), x), None

        if remat:
            body = jax.checkpoint(body)
        rest = whole({k: v for k, v in params.items() if k != "layers"}, 1)
        out = rest["embedding"][x] + rest["positions"]
        if is_scanned:
            out, _ = lax.scan(body, out, params["layers"])
        else:
            for i in range(layers):
                of_layer = jax.tree.map(operator.itemgetter(i), params["layers"])
                out, _ = body(out, of_layer)
        return _cross_entropy(_norm(out, rest["norm"]) @ rest["head"], y)

    return Model(build, loss, functools.partial(_tokens, sizes))


def _block(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    qkv = _norm(x, weights["first norm"]) @ weights["qkv"]
    x = x + _attention(qkv) @ weights["out"]
    return (
        x + nn.gelu(_norm(x, weights["second norm"]) @ weights["up"]) @ weights["down"]
    )


def _attention(qkv: jax.Array) -> jax.Array:
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, HEADS, -1), 2, 0)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(*qkv.shape[:2], -1)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


class Block(nn.Module):
    """One layer, for `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        out = _attention(nn.Dense(3 * width)(nn.RMSNorm()(x)))
        x = x + nn.Dense(width)(out)
        out = nn.gelu(nn.Dense(4 * width)(nn.RMSNorm()(x)))
        return x + nn.Dense(width)(out), None


class Transformer(nn.Module):
    """Flax's `nn.scan` over `nn.remat` of a layer."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = self.sizes
        x = nn.Embed(sizes.tokens, sizes.width)(x)
        stack: Any = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=sizes.layers,
        )
        x, _ = stack()(x, None)
        return nn.Dense(sizes.tokens)(nn.RMSNorm()(x))


def flax_transformer(sizes: Sizes) -> Model:
    """A `TrainState` of the same layers."""
    module = Transformer(sizes)

    def loss(params: PyTree, x: jax.Array, y: jax.Array, _: Whole) -> jax.Array:
        logits = module.apply({"params": params}, x)
        assert isinstance(logits, jax.Array)
        return _cross_entropy(logits, y)

    example = jnp.zeros((1, sizes.length), jnp.int32)
    build = functools.partial(_train_state, module, example)
    return Model(build, loss, functools.partial(_tokens, sizes), takes_whole=False)


MODELS: Mapping[str, Callable[[Sizes], Model]] = {
    "perceptron": perceptron,
    "perceptron, Flax": flax_perceptron,
    "transformer": transformer,
    "transformer, Flax": flax_transformer,
    "transformer, no remat": functools.partial(transformer, remat=False),
    "transformer, no scan": functools.partial(transformer, is_scanned=False),
}


# All.


def _train_state(module: nn.Module, example: jax.Array, key: jax.Array) -> TrainState:
    params = module.init(key, example)["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=OPTIMIZER)


def _numbers(sizes: Sizes, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    shape = (2, num_replicas, sizes.rows, sizes.units)
    x, y = draw.normal(size=shape).astype(np.float32)
    return x, y


def _tokens(sizes: Sizes, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    shape = (num_replicas, sizes.rows, sizes.length + 1)
    drawn = draw.integers(0, sizes.tokens, shape).astype(np.int32)
    return drawn[..., :-1], drawn[..., 1:]


def _cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
