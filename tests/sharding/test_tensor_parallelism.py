"""A block of a transformer whose heads and layers each replica's devices divide."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js

WIDTH, HEADS, LENGTH = 16, 8, 8
INIT = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros


def over(*names, init=INIT):
    return nn.with_partitioning(init, names)


class Block(nn.Module):
    """Attention, then two layers. Flax's attention names the axes of a matrix."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(
            HEADS,
            use_bias=False,
            kernel_init=over(None, "core"),
            out_kernel_init=over("core"),
        )(nn.LayerNorm()(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        columns, bias = over(None, "core"), over("core", init=ZEROS)
        y = nn.Dense(4 * WIDTH, kernel_init=columns, bias_init=bias)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, kernel_init=over("core", None))(nn.gelu(y))


@pytest.mark.slow
def test_a_block_costs_two_reductions_inside_a_replica_and_no_gather():
    strategy = js.MirroredStrategy(logical_axes={"core": 2})
    x = strategy.per_replica(np.ones((4, 2, LENGTH, WIDTH), np.float32))
    params = strategy.init(Block().init, jax.random.key(0), x.local(0))

    def forward(params, x):
        return Block().apply(params, x)

    program = jax.jit(lambda params, x: strategy.run(forward, (params, x)))
    text = program.lower(params, x).compile().as_text()
    # Shoeybi et al., 2019 (arXiv:1909.08053), figure 3: one after the attention, one
    # after the second layer.
    reductions = re.findall(r"= \S+ all-reduce(?:-start)?\((?:.*)", text)
    assert len(reductions) == 2, text
    assert all("[4,2]<=[8]" in r or "{{0,1},{2,3}" in r for r in reductions)
    assert "all-gather" not in text and "all-to-all" not in text
    assert "collective-permute" not in text
