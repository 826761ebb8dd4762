"""`strategy.explain`: what a step would do, told without running it."""

import dataclasses
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.lines import Line, marked
from helpers.replicas import replica
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.profiling import links as _links
from jaxstrategy._src.tracing.explanation import compiled_program

AXIS = "replica"


def training_step(state, batch, training=True):
    def loss(w):
        error = batch["x"] @ w["a"] + w["b"]  # <- varies
        return (error**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    grads = replica().all_reduce("mean", grads)  # <- grads
    return jax.tree.map(jnp.subtract, state, grads), value


@pytest.fixture
def arguments(four):
    state = {"a": np.ones((3, 2), np.float32), "b": np.float32(0)}
    batch = {"x": four.per_replica(np.ones((4, 5, 3), np.float32))}
    return four.mirror(state), batch


@pytest.fixture
def explained_step(four, arguments):
    return four.explain(training_step, arguments)


def test_every_collective_has_kind_bytes_dtype_and_line(explained_step):
    found = explained_step.collectives
    (found,) = found  # both gradients are small, and go together
    assert (found.operation, found.kind) == ("psum", "all_reduce")
    assert (found.nbytes, found.dtypes) == (3 * 2 * 4 + 4, ("float32",))
    assert found.line == marked(training_step, "grads")
    assert explained_step.communicated_bytes == 28


def test_loops_multiply_and_unknown_ones_say_so(four):
    def step(x, n):
        def inner(c, _):
            return lax.pmean(c, AXIS), None

        def outer(c, _):
            return lax.scan(inner, c, length=3)[0], None

        x, _ = lax.scan(outer, x, length=5)
        return lax.fori_loop(0, n, lambda i, c: lax.pmean(c, AXIS), x)

    found = four.explain(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]), 7))
    first, second = found.collectives
    assert (first.loops, first.times, first.least_times) == ((3, 5), 15, 15)
    assert (second.loops, second.times, second.least_times) == ((None,), None, 1)
    assert found.communicated_bytes == 16 * 4
    assert "in 3 turns, in 5 turns" in str(found)
    assert "in a loop, turns unknown" in str(found)


def test_branches_and_groups_are_noted(four):
    def step(x, flag):
        y = lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]])
        return lax.cond(flag > 0, lambda: lax.pmax(y, AXIS), lambda: y)

    found = four.explain(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]), 1))
    grouped, in_branch = found.collectives
    assert (grouped.group, grouped.in_branch) == (2, False)
    assert (in_branch.group, in_branch.in_branch) == (None, True)
    assert "in groups of 2" in str(found)
    assert "in a branch" in str(found)


def test_a_collective_made_by_differentiation_is_told_apart(four):
    def step(x):
        def loss(v):
            return replica().all_reduce("mean", v) ** 2  # <- forward

        return jax.grad(loss)(x)

    found = four.explain(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),))
    assert [c.is_transposed for c in found.collectives] == [False, True]
    assert {c.line for c in found.collectives} == {marked(step, "forward")}
    assert "from differentiation" in str(found)


def test_a_step_without_collectives(two):
    found = two.explain(lambda x: x + 1, (1.0,))
    assert found.collectives == ()
    assert found.communicated_bytes == 0
    assert found.communication_time(js.profiling.Topology(1e9, 1e-6, 8)) == 0
    assert "Collectives: none" in str(found)


def test_results_are_mirrored_or_name_the_line_where_they_began_to_vary(
    explained_step,
):
    paths = [value.path for value in explained_step.mirrored]
    assert paths == ["training_step(...)[0]['a']", "training_step(...)[0]['b']"]
    (loss,) = explained_step.per_replica
    assert (loss.path, loss.shape, loss.dtype) == (
        "training_step(...)[1]",
        (),
        "float32",
    )
    assert loss.line == marked(training_step, "varies")
    assert "(from argument `batch['x']`, a PerReplica)" in loss.why


def test_static_arguments_are_listed(four, arguments):
    found = four.explain(training_step, arguments, {"training": False})
    assert found.static_arguments == {"training": False}
    assert "Static arguments" in str(found)
    assert four.explain(training_step, arguments).static_arguments == {}


def test_arguments_that_could_be_donated(four, arguments, explained_step):
    assert [value.path for value in explained_step.donatable] == [
        "state['a']",
        "state['b']",
    ]
    assert explained_step.donate_argnums == (0,)
    assert "RunOptions(donate_argnums=(0,))" in str(explained_step)
    options = js.RunOptions(donate_argnums=0)
    found = four.explain(training_step, arguments, options=options)
    assert [value.path for value in found.donated] == ["state['a']", "state['b']"]
    assert found.donatable == ()
    assert found.memory.donated >= 28


def test_only_what_a_result_can_take_over_is_donatable(four):
    def step(a, b, x, n):
        return a + b.sum() + lax.psum(x, AXIS), x + n

    a, b = np.ones(3, np.float32), np.ones(2, np.float32)
    x = four.per_replica(np.ones((4, 3), np.float32))
    found = four.explain(step, (a, b, x, 1.0))
    assert [value.path for value in found.donatable] == ["a", "x"]
    assert found.donate_argnums == (0, 2)


def test_the_variables_that_are_used_are_named_and_not_changed(two):
    with two.scope():
        total = js.Variable(1.0, name="total", aggregation="sum")
        js.Variable(1.0, name="unused")

    def step(x):
        total.assign_add(x)

    found = two.explain(step, (two.per_replica([1.0, 2.0]),))
    assert found.variables == ("total",)
    assert total.numpy() == 1.0
    assert "Variables\n  name\n  total\n" in str(found)


def test_communication_times_are_the_formulas(explained_step):
    topology = js.profiling.Topology(bandwidth=1e6, latency=1e-3, replicas=64)
    ring = 2 * 63 * 1e-3 + 2 * 63 / 64 * 28 / 1e6
    tree = 2 * 6 * (1e-3 + 28 / 1e6)
    assert explained_step.communication_time(topology, "ring") == pytest.approx(ring)
    assert explained_step.communication_time(topology, "tree") == pytest.approx(tree)
    assert explained_step.communication_time(topology) == pytest.approx(min(ring, tree))
    with pytest.raises(ValueError, match="`algorithm` was 'star'; 'ring', 'tree' or"):
        explained_step.communication_time(topology, "star")


@each_of("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 3], [2]]])
def test_a_group_of_several_hosts_uses_the_links_between_them(four, groups):
    def step(x):
        return lax.pmax(x, AXIS, axis_index_groups=groups)

    found = four.explain(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),))
    host = js.profiling.Topology(bandwidth=40.0, latency=0.0, replicas=2)
    hosts = js.profiling.Topology(bandwidth=4.0, latency=0.0, replicas=4, inside=host)
    # 4 B; of a group that counts as full, a host's two have a half each.
    seconds = {2: 0.1, 3: 0.05 + 0.5 + 0.05}[max(map(len, groups))]
    if groups[0] == [0, 2]:
        seconds = 1.0
    assert found.communication_time(hosts, "ring") == pytest.approx(seconds)


def test_the_report_predicts_for_8_64_and_4096_replicas(four, arguments):
    topology = js.profiling.Topology(bandwidth=1e9, latency=5e-6, replicas=16)
    report = str(four.explain(training_step, arguments, topology=topology))
    assert "step, 1 GB/s and 5 us a message" in report
    rows = [line.split() for line in report.splitlines()]
    table = {row[0]: row[1:] for row in rows if row and row[0].isdigit()}
    for replicas in (8, 16, 64, 4096):
        ring = 2 * (replicas - 1) * (5e-6 + 28 / replicas / 1e9)
        number, unit = table[str(replicas)][:2]
        seconds = float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]
        assert seconds == pytest.approx(ring, rel=5e-3)


def test_the_report_says_between_which_times_measured_links_lie(four, arguments):
    messages, spread = ((4, 1e-6), (10, 3e-6)), ((9e-7, 2e-6), (3e-6, 8e-6))
    topology = js.profiling.Topology(1e9, 5e-6, 2, messages=messages, spread=spread)
    found = four.explain(training_step, arguments, topology=topology, compiled=False)
    # 28 B: around a ring of 8 in 14 messages of 3.5 B, of 4 in 6 of 7 B.
    assert found.communication_bounds(topology.with_replicas(4), "ring") == (
        pytest.approx((6 * 9e-7, 6 * 8e-6))
    )
    least, most = found.communication_bounds(topology.with_replicas(4))
    assert least < found.communication_time(topology.with_replicas(4)) < most
    report = str(found)
    assert "a message (between the times of 2 measured messages)\n" in report
    assert re.search(r"^  8 +up to 28 us +54 us to 84 us$", report, re.MULTILINE)
    # Two messages of 14 B, 4 B more than the last known one.
    assert re.search(r"^  2 +8.67 us to 18.7 us  ", report, re.MULTILINE), report


def test_memory_and_operations_of_the_compiled_program(four):
    def step(w, x):
        return x @ w

    w = np.ones((64, 32), np.float32)
    x = four.per_replica(np.ones((4, 16, 64), np.float32))
    found = four.explain(step, (w, x))
    assert found.flops >= 2 * 16 * 64 * 32
    assert found.memory.arguments >= 4 * (64 * 32 + 16 * 64)
    assert found.memory.results >= 4 * 16 * 32
    assert found.memory.peak >= found.memory.arguments + found.memory.results
    assert "floating-point operations" in str(found)


def test_compiling_can_be_left_out(four, arguments, compilations):
    compilations()
    found = four.explain(training_step, arguments, compiled=False)
    assert (found.memory, found.flops, compilations()) == (None, None, 0)
    assert "XLA" not in str(found)


def test_the_step_does_not_run_and_its_python_code_runs_once(two):
    seen = []

    def step(x):
        seen.append("traced")
        jax.debug.callback(lambda v: seen.append("ran"), x)
        return x

    two.explain(step, (two.per_replica([1.0, 2.0]),))
    jax.effects_barrier()
    assert seen == ["traced"]


def test_what_run_would_refuse_is_listed(four):
    def step(x):
        once = replica().all_reduce("sum", x)
        twice = replica().all_reduce("sum", once)
        return lax.cond(x > 0, lambda: lax.pmax(x, AXIS), lambda: x), twice

    x = four.per_replica([1.0, 2.0, 3.0, 4.0])
    options = js.RunOptions(expect_mirrored=(True, False))
    found = four.explain(step, (x,), options=options)
    hangs, differs, twice = found.problems
    assert "would reach the `pmax`" in hangs
    assert "`step(...)[0]` was expected to be mirrored" in differs
    assert "reduction already" in twice
    assert "Problems" in str(found)


def test_a_decorated_step_is_explained_as_it_was_decorated(four, arguments):
    step = four.run(training_step, options=js.RunOptions(donate_argnums=0))
    found = four.explain(step, arguments)
    assert found.name == "training_step"
    assert [value.path for value in found.donated] == ["state['a']", "state['b']"]


def test_what_cannot_be_called_is_an_error(two):
    with pytest.raises(TypeError, match="`explain` was given 3, which cannot be"):
        two.explain(3)


def test_inside_run_it_is_an_error(two):
    def step(x):
        two.explain(lambda x: x, (x,))

    with pytest.raises(js.errors.ContextError, match="`strategy.explain` was called"):
        two.run(step, (1.0,))


def test_equal_rows_are_put_together(four):
    def step(xs):
        return [replica().all_reduce("mean", x) for x in xs]  # <- all

    xs = [four.per_replica(np.ones((4, i), np.float32)) for i in range(1, 21)]
    report = str(four.explain(step, (xs,), compiled=False))
    (row,) = (line for line in report.splitlines() if "psum" in line)
    assert row.split()[:5] == ["20", "psum", "float32", "840", "B"]
    assert f"test_explain.py:{marked(step, 'all').number}: return" in row
    assert "and 8 more" in report


def texts(element, name):
    return ["".join(each.itertext()) for each in element.iter(name)]


def test_the_html_is_escaped_and_has_the_same_rows(four):
    def step(x):
        return x < 1, replica().all_reduce("sum", x)

    problem = "First line.\n  step.py:1: x\nLast line."
    found = four.explain(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),))
    found = dataclasses.replace(found, problems=(problem, "Another."))
    page = ElementTree.fromstring(found._repr_html_())
    assert "x < 1" in "".join(page.itertext())
    text = str(found).replace("`", "")
    lines = {" ".join(line.split()) for line in text.splitlines()}
    rows = [" ".join(texts(row, "td")).split() for row in page.iter("tr")]
    assert len(rows) > 10
    assert {" ".join(row) for row in rows if row} <= lines
    assert texts(page, "pre") == [problem, "Another."]
    assert "First line.\n    step.py:1: x\n  Last line.\n" in text
    assert repr(found) == str(found)


# `strategy.explain`: what devices exchange inside a replica, and over replicas.


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
def explained_devices(cores):
    w, v = ones(cores, (16, 32), None, "core"), ones(cores, (32, 8), "core")
    x = cores.per_replica(np.ones((4, 3, 16), np.float32))
    return cores.explain(perceptron, (w, v, x))


def test_communication_of_replicas_is_told_apart_from_that_of_a_replica(
    explained_devices,
):
    (over,) = explained_devices.collectives
    assert (over.operation, over.nbytes) == ("psum", 3 * 8 * 4)
    assert over.line == marked(perceptron, "replicas")
    assert explained_devices.communicated_bytes == 96

    # Each device has half of the terms of the second product.
    (inner,) = explained_devices.inner_collectives
    assert (inner.operation, inner.kind) == ("all-reduce", "all_reduce")
    assert (inner.nbytes, inner.dtypes, inner.axes) == (96, ("float32",), ("core",))
    assert inner.group == 2 and inner.groups[0] == (0, 1)
    assert inner.line == marked(perceptron, "inner")
    assert (inner.times, explained_devices.inner_bytes) == (1, 96)

    compiled = [each.axes for each in explained_devices.compiled_collectives]
    assert sorted(compiled) == [("core",), ("replica",)]
    assert explained_devices.logical_axes == {"core": 2}


def test_the_report_tells_them_apart(explained_devices):
    report = str(explained_devices)
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
    html = explained_devices._repr_html_()
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
        compiled_program.HloModule(text).collectives(cores._replicas, "/outermost.py")
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
    found = compiled_program.figures(OnGpu())
    assert found.flops == loop + batched + 3 * convolution
    arrays = 4 * (2 * 64 * 32 + 32 * 32), 2 * 8 * (2 * 16 * 4 + 16 * 16)
    images = 4 * 3 * (2 * 9 * 9 * 3 + 6 * 3 * 3 * 3 + 2 * 4 * 4 * 6)
    assert (found.operations, found.moved) == (
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
