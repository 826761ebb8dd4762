"""Benchmarks count what the collectives of a compiled program move, loops included."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

FOLDER = Path(__file__).parents[2] / "benchmarks"
AXIS = "replica"
TURNS, ROWS = 5, 48
KB = 4 * ROWS * 8  # of all rows of eight numbers


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_compiled")


def compiled(reader, name, body, count, donate=False):
    """The program of `body`, in which `count` of the devices take part."""
    mesh = jax.make_mesh((count,), (AXIS,), devices=jax.devices()[:count])
    body.__name__ = name
    split = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    split.__name__ = name
    jitted = jax.jit(split, donate_argnums=0 if donate else ())
    everywhere = jax.NamedSharding(mesh, P())
    out = jitted(jax.device_put(jnp.ones((ROWS, 8)), everywhere))
    return jitted, out, reader.compiled(name)


def test_one_of_each(reader):
    count = 8

    def counted_once(x):
        part = lax.psum_scatter(x, AXIS, tiled=True)
        parts = lax.all_to_all(part, AXIS, 1, 0, tiled=True)
        there = lax.ppermute(parts, AXIS, [(0, 1), (1, 0)])
        whole = lax.all_gather(part, AXIS, tiled=True)
        return lax.psum(whole * 2, AXIS), lax.pmax(there, AXIS)

    keep = compiled(reader, f"counted_once_{count}", counted_once, count)
    program, part = keep[-1], KB // count
    assert program.whole_by_kind() == {
        "reduce-scatter": KB,
        "all-gather": KB,
        "all-to-all": part,
        "collective-permute": part,
        "all-reduce": KB + part,
    }
    step = (count - 1) / count
    sent = step * (KB + KB + part) + part + 2 * step * (KB + part)
    np.testing.assert_allclose(program.sent, sent)


def test_asynchronous_and_16_bits(reader):
    text = """HloModule m, num_partitions=4

ENTRY %main (p: bf16[8]) -> bf16[32] {
  %p = bf16[8]{0} parameter(0)
  %start = (bf16[8]{0}, bf16[32]{0}) all-gather-start(%p), replica_groups={{0,1},{2,3}}
  %alone = bf16[8]{0} all-reduce(%p), replica_groups=[4,1]<=[4], to_apply=%add
  %all = bf16[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
  ROOT %done = bf16[32]{0} all-gather-done(%start)
}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}
"""
    found = [(c.kind, c.nbytes, c.group) for c in reader.collectives(text)]
    assert found == [
        ("all-gather", 64, 2),
        ("all-reduce", 16, 1),
        ("all-reduce", 16, 4),
    ]
