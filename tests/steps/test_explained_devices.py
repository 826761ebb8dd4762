"""`strategy.explain`: what devices exchange inside a replica, and over replicas."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.lines import Line, marked
from helpers.replicas import replica
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.profiling import links as _links
from jaxstrategy._src.tracing.explanation import compiled_program

AXIS = "replica"


@pytest.fixture(scope="module")
def cores():
    """4 replicas of 2 devices each."""
    return js.MirroredStrategy(logical_axes={"core": 2})


def ones(strategy, shape, *spec):
    where = NamedSharding(strategy.mesh, P(*spec))
    return jax.device_put(np.ones(shape, np.float32), where)


def perceptron(w, v, x):
    y = (x @ w) @ v  # <- inner
    return replica().all_reduce("sum", y)  # <- replicas


@pytest.fixture(scope="module")
def explained(cores):
    w, v = ones(cores, (16, 32), None, "core"), ones(cores, (32, 8), "core")
    x = cores.per_replica(np.ones((4, 3, 16), np.float32))
    return cores.explain(perceptron, (w, v, x))


def test_communication_of_replicas_is_told_apart_from_that_of_a_replica(explained):
    (over,) = explained.collectives
    assert (over.operation, over.nbytes) == ("psum", 3 * 8 * 4)
    assert over.line == marked(perceptron, "replicas")
    assert explained.communicated_bytes == 96

    # Each device has half of the terms of the second product.
    (inner,) = explained.inner_collectives
    assert (inner.operation, inner.kind) == ("all-reduce", "all_reduce")
    assert (inner.nbytes, inner.dtypes, inner.axes) == (96, ("float32",), ("core",))
    assert inner.group == 2 and inner.groups[0] == (0, 1)
    assert inner.line == marked(perceptron, "inner")
    assert (inner.times, explained.inner_bytes) == (1, 96)

    compiled = [each.axes for each in explained.compiled_collectives]
    assert sorted(compiled) == [("core",), ("replica",)]
    assert explained.logical_axes == {"core": 2}


def test_the_report_tells_them_apart(explained):
    report = str(explained)
    assert report.startswith(
        "`perceptron` on 4 replicas, the devices of each along core=2\n"
    )
    sections = {part.split("\n")[0]: part for part in report.split("\n\n")}
    inner = sections[
        "Inside a replica, between its devices: 96 B from each device in a step"
    ]
    assert "all-reduce" in inner and "# <- inner" in inner
    over = sections["Over the replicas, as compiled: 96 B from each device in a step"]
    assert "replica  float32  96 B" in over and "# <- inner" not in over
    html = explained._repr_html_()
    assert "Inside a replica, between its devices: 96 B" in html
    assert "# &lt;- inner" in html


def test_one_device_gives_its_part_of_what_lies_over_the_axis(cores):
    def step(w, x):
        return replica().all_reduce("sum", w * x.sum())

    w = ones(cores, (512, 512), None, "core")
    x = cores.per_replica(np.ones((4, 2), np.float32))
    found = cores.explain(step, (w, x))
    assert found.communicated_bytes == 2**20
    (over,) = found.compiled_collectives
    assert (over.axes, over.nbytes) == (("replica",), 2**19)
    assert over.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert found.inner_collectives == () and found.inner_bytes == 0
    assert "Inside a replica, between its devices: nothing" in str(found)
    # The time of the compiled program's, on links of 8 devices, 2 on each host.
    host = js.profiling.Topology(bandwidth=1e30, latency=0, replicas=2)
    links = js.profiling.Topology(bandwidth=2.0**19, latency=0, replicas=8, inside=host)
    assert over.seconds(links, "ring") == pytest.approx(2 * 3 / 4)


def test_a_hidden_gather_is_seen(cores):
    def step(w, x):
        w = jnp.sort(w)  # <- gather
        return replica().all_reduce("sum", w * x)

    w = ones(cores, (6,), "core")
    found = cores.explain(step, (w, cores.per_replica([1.0, 2.0, 3.0, 4.0])))
    gathers = [each for each in found.inner_collectives if each.kind == "all_gather"]
    assert [each.nbytes for each in gathers] == [3 * 4]
    assert gathers[0].line == marked(step, "gather")


def test_collectives_that_the_step_writes_over_an_inner_axis_are_not_of_replicas(cores):
    def step(x):
        def of_core(x):
            return lax.psum(x, "core")  # <- own

        inner = jax.shard_map(
            of_core, in_specs=P("core"), out_specs=P(), axis_names={"core"},
            check_vma=False,
        )  # fmt: skip
        return inner(x)

    found = cores.explain(step, (cores.per_replica(np.ones((4, 6), np.float32)),))
    assert found.collectives == () and found.communicated_bytes == 0
    (inner,) = found.inner_collectives
    assert (inner.axes, inner.nbytes) == (("core",), 12)
    assert inner.line == marked(step, "own")


def all_kinds(x):
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    return (
        replica().all_reduce("mean", x),
        lax.pmax(x, AXIS, axis_index_groups=pairs),
        lax.ppermute(x, AXIS, [(0, 1)]),
        lax.all_gather(x, AXIS),
    )


def sharing(devices, per_device):
    return js.MirroredStrategy(jax.devices()[:devices], replicas_per_device=per_device)


def test_lanes_are_added_up_before_devices_exchange_anything():
    strategy = sharing(2, 4)
    x = strategy.per_replica(np.ones((8, 6), np.float32))
    found = strategy.explain(lambda x: lax.psum(x, AXIS), (x,))
    (over,) = found.collectives
    assert over.nbytes == 24
    assert [(e.kind, e.nbytes) for e in over.between_devices] == [("all_reduce", 24)]
    (compiled,) = found.compiled_collectives
    assert (compiled.operation, compiled.nbytes) == ("all-reduce", 24)
    assert compiled.group == 2
    assert str(found).startswith("`<lambda>` on 8 replicas, 4 on each device\n")
    assert "Between devices, as compiled: 24 B from each device" in str(found)
    # What lanes have no rule for is gathered.
    found = strategy.explain(all_kinds, (x,), compiled=False)
    told = [
        [(e.kind, e.nbytes) for e in each.between_devices] for each in found.collectives
    ]
    assert told == [[("all_reduce", 24)], *[[("all_gather", 4 * 24)]] * 3]


def test_the_report_names_the_links_inside_hosts(cores):
    host = js.profiling.Topology(bandwidth=300e9, latency=2e-6, replicas=2)
    links = js.profiling.Topology(
        bandwidth=25e9, latency=10e-6, replicas=4, inside=host
    )
    x = cores.per_replica([1.0, 2.0, 3.0, 4.0])
    found = cores.explain(lambda x: lax.psum(x, AXIS), (x,), topology=links)
    report = str(found)
    assert (
        "step, 25 GB/s and 10 us a message; inside 2 replicas 300 GB/s and 2 us"
        in report
    )
    # 4 B: 2 us, 20 us between two hosts, and 2 us.
    assert ["4", "24", "us", "24", "us"] in [
        line.split() for line in report.split("\n")
    ]


def measured(strategy):
    # 0.03 s, and 0.06 s for each 4 MiB.
    turns = [n * (0.03 + 0.06 * size / 2**22) for size, n in _links._SIZES]
    times = itertools.chain(*([0.0, turn] for turn in turns * 7))
    return _links.measured(strategy._replicas, clock=lambda: next(times))


@pytest.mark.slow
def test_links_between_devices_that_replicas_share_are_measured():
    links = measured(sharing(2, 4))
    assert links.replicas == 8
    devices = links.with_replicas_per_device(4)
    assert devices.ring("all_reduce", 0) == pytest.approx(0.03, rel=0.01)
    assert devices.ring("all_reduce", 2**22) == pytest.approx(0.09)
    alone = _links.measured(sharing(1, 8)._replicas, clock=None)
    assert alone.with_replicas_per_device(8).ring("all_reduce", 2**22) == 0


# The texts of compiled programs, also as other platforms write them.

PROGRAM = Path(__file__).parents[1] / "helpers" / "compiled_program.hlo"


@pytest.fixture(scope="module")
def written(cores):
    text = PROGRAM.read_text().replace("FILE", __file__)
    return list(
        compiled_program.compiled_collectives(text, cores._replicas, "/outermost.py")
    )


def test_the_text_of_a_program_is_read(written):
    scattered, permuted, gathered, reduced = written
    # All ways to write groups.
    assert scattered.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert permuted.groups == ((0, 2), (2, 4))
    assert gathered.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert reduced.groups == (tuple(range(8)),)
    over = [each.axes for each in written]
    assert over == [("replica",), ("replica",), ("core",), ("replica", "core")]
    assert [each.is_inner for each in written] == [False, False, True, True]
    # Starts of collectives count with their operands.
    kinds = ["reduce_scatter", "permute", "all_gather", "all_reduce"]
    assert [each.kind for each in written] == kinds
    assert [each.nbytes for each in written] == [8 * 6 * 2, 4 * 4, 16, 1]
    dtypes = [("bfloat16",), ("float32",), ("float8_e4m3fn",), ("bool",)]
    assert [each.dtypes for each in written] == dtypes
    assert [each.loops for each in written] == [(), (None,), (), ()]
    assert [each.in_branch for each in written] == [False, False, True, False]
    # Frame 1 has called the outermost file, frame 2, which the last one is of.
    lines = [each.line for each in written]
    assert lines == [None, Line(__file__, 5), None, None]


def test_groups_by_axes_of_any_order():
    axes = {"a": 2, "b": 2}
    replicas = js.MirroredStrategy(jax.devices(), logical_axes=axes)._replicas
    text = (
        PROGRAM.read_text()
        .replace("FILE", __file__)
        .replace(
            "mesh['replica'=4,'core'=2] {'core'}",
            "mesh['replica'=2,'a'=2,'b'=2] {'replica','b'}",
        )
    )
    found = list(
        compiled_program.compiled_collectives(text, replicas, "/outermost.py")
    )[2]
    assert found.groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert found.axes == ("replica", "b")


class OnGpu:
    """A program of an H200 (JAX 0.11), of which XLA counts only -1 for each call."""

    def __init__(self, name="gpu_program.hlo"):
        self._name = name

    def as_text(self):
        return PROGRAM.with_name(self._name).read_text()

    def cost_analysis(self):
        return {"flops": -5.0, "bytes accessed": -5.0}

    def memory_analysis(self):
        return None


def test_products_and_convolutions_of_libraries_are_counted():
    loop, batched = 2 * 64 * 32 * 32, 2 * 8 * 16 * 16 * 4
    convolution = 2 * (2 * 4 * 4 * 6) * (3 * 3 * 3)
    flops = compiled_program.figures(OnGpu()).flops
    assert flops == loop + batched + 3 * convolution
    arrays = 4 * (2 * 64 * 32 + 32 * 32), 2 * 8 * (2 * 16 * 4 + 16 * 16)
    images = 4 * 3 * (2 * 9 * 9 * 3 + 6 * 3 * 3 * 3 + 2 * 4 * 4 * 6)
    assert compiled_program.work(OnGpu()) == (
        5 * loop + batched + 3 * convolution,
        5 * arrays[0] + arrays[1] + images,
    )


def test_attention_of_cudnn_is_counted_and_other_kernels_are_named():
    one = 2 * (2 * 4 * 128) * 64  # a product for each query, for one key
    forward, causal, window, backward = 2 * 256, 2 * 128, 2 * 16, 5 * 256
    found = compiled_program.figures(OnGpu("gpu_attention.hlo"))
    assert found.flops == one * (forward + causal + window + backward)
    assert found.uncounted_calls == ("__gpu$xla.gpu.triton", "cusolver_getrf_ffi")
    assert compiled_program.figures(OnGpu()).uncounted_calls == ()


def test_operations_that_nobody_counts_are_told():
    strategy = js.MirroredStrategy(jax.devices()[:2])
    found = strategy.explain(jnp.linalg.cholesky, (np.eye(3, dtype=np.float32),))
    (name,) = found.uncounted_calls
    assert f"floating-point operations, without {name}" in str(found)
    step = strategy.profile(strategy.step(jnp.linalg.cholesky))
    step(np.eye(3, dtype=np.float32))
    assert step.report().flops_are_least
