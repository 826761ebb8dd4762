"""Small arrays are reduced in packs, and those beside the computation."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.reductions import assert_same_bits, collectives, on, ordered, stacked
from helpers.replicas import replica
from jax.extend.core import Literal

import jaxstrategy as js
from jaxstrategy._src.reductions.packing import Overlap, Packing, overlap_on
from jaxstrategy._src.strategies import strategy as strategy_module
from jaxstrategy.experimental import CommunicationOptions

OVERLAP = CommunicationOptions(overlap=True)


def asking(n, **options):
    return js.MirroredStrategy(
        jax.devices()[:n], communication_options=CommunicationOptions(**options)
    )


@each_of(
    "sizes, expected",
    [
        ([], []),
        ([1, 2, 3], [[0, 1, 2]]),
        ([4, 4, 4], [[0, 1], [2]]),  # a pack is full
        ([1, 20, 2], [[1], [0, 2]]),  # a large one goes alone, the pack waits
        ([1, 20, 20, 2], [[1], [0], [2], [3]]),  # but not for ever
        ([20, 1], [[0], [1]]),
    ],
)
def test_small_arrays_wait_for_those_that_come_next(sizes, expected):
    assert Packing(5, 8, 30).buckets(sizes) == expected


# Four layers, of which the tree's order is not that of their use.
NAMES = ("m", "a", "z", "k")
SIZE = 8


def parameters(dtype="float32"):
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=(SIZE, SIZE)).astype(np.float32).astype(dtype)
        for name in NAMES
    }


def loss(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name])
    return (x.astype(jnp.float32) ** 2).mean()


def gradient_step(params, x):
    grads = jax.grad(loss)(params, x)
    grads = js.get_replica_context().all_reduce("mean", grads)
    return jax.tree.map(lambda p, g: p - g, params, grads)


def batches(strategy):
    n = strategy.num_replicas_in_sync
    x = np.random.default_rng(1).normal(size=(n, 4, SIZE))
    return strategy.per_replica(x.astype(np.float32))


def replica_jaxpr(strategy, step, *args):
    """The jaxpr that has the sums, wherever it is."""
    left = [jax.make_jaxpr(lambda *args: strategy.run(step, args))(*args).jaxpr]
    while left:
        jaxpr = left.pop()
        if any(eqn.primitive.name == "psum" for eqn in jaxpr.eqns):
            return jaxpr
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            left += [] if inner is None else [getattr(inner, "jaxpr", inner)]
    raise AssertionError("there are no sums")


def products_before_sums(jaxpr):
    """For each sum, in order, how many matrix products its operand depends on."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def needed(atoms):
        seen, left = set(), list(atoms)
        while left:
            atom = left.pop()
            eqn = None if isinstance(atom, Literal) else made.get(atom)
            if eqn is not None and id(eqn) not in seen:
                seen.add(id(eqn))
                left += eqn.invars
        return [eqn for eqn in jaxpr.eqns if id(eqn) in seen]

    return [
        sum(each.primitive.name == "dot_general" for each in needed(eqn.invars))
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "psum"
    ]


def test_a_pack_depends_on_the_layers_whose_gradients_it_has_alone():
    strategy = asking(2, overlap=True, bytes_per_pack=2 * 4 * SIZE**2)  # two layers
    step = replica_jaxpr(strategy, gradient_step, parameters(), batches(strategy))
    # Forward 4, two gradients of weights, and those of what is between the layers: of
    # the last two layers one, of the first two all three. No other gradient.
    assert products_before_sums(step) == [4 + 2 + 1, 4 + 2 + 3]


@each_of("where", ["a jitted function", "a loop", "casts"])
def test_the_order_is_found_through(where):
    strategy = asking(2, overlap=True, bytes_per_pack=4 * SIZE**2)  # one layer

    def step(params, x):
        grad = jax.grad(loss)
        if where == "a jitted function":
            grad = jax.jit(grad)
        if where == "casts":
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        grads = grad(params, x)
        if where == "casts":  # each far behind the gradient, in the tree's order
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / 3, grads)
        return js.get_replica_context().all_reduce("sum", grads)

    def turns(params, x):
        return jax.lax.scan(lambda p, _: (step(p, x), None), params, None, length=2)[0]

    run = turns if where == "a loop" else step
    jaxpr = replica_jaxpr(strategy, run, parameters(), batches(strategy))
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "psum"]
    # "k" is the last layer: its gradient is the first one. The results of a step are
    # in the order of the tree: a, k, m, z.
    results = [var for eqn in sums for var in eqn.outvars]
    assert [place_of(jaxpr, var) for var in results] == [1, 3, 0, 2]


def place_of(jaxpr, var):
    """Which result of the jaxpr is made of a variable, and of nothing else."""
    for eqn in jaxpr.eqns:
        if len(eqn.outvars) == 1 and eqn.outvars[0].aval.shape == (SIZE, SIZE):
            if any(each is var for each in eqn.invars):
                var = eqn.outvars[0]
    return [each is var for each in jaxpr.outvars].index(True)


STATE = js.StateSharding("state", min_bytes=0)


@pytest.mark.slow
@each_of(
    "devices, layout",
    [
        (3, {}),
        (2, {"replicas_per_device": 2}),
        (2, {"sharding": STATE}),
        (4, {"logical_axes": {"core": 2}}),
    ],
)
def test_no_bit_changes(devices, layout):
    def step(tree):
        replica = js.get_replica_context()
        few = {k: v for k, v in tree.items() if k != "c"}  # which have no largest
        return replica.all_reduce("mean", tree), replica.all_reduce("max", few)

    found = []
    for overlap in (False, True):
        options = CommunicationOptions(overlap=overlap, bytes_per_pack=100)
        strategy = js.MirroredStrategy(
            jax.devices()[:devices], communication_options=options, **layout
        )
        n = strategy.num_replicas_in_sync
        rng = np.random.default_rng(0)
        tree = {
            "b": rng.normal(size=(n, 3, 4)).astype(jnp.bfloat16),
            "c": (rng.normal(size=(n, 5)) + 1j).astype(np.complex64),
            "e": np.zeros((n, 0), np.float32),
            "f": rng.normal(size=(n, 6, 2)).astype(np.float32),
            "i": rng.integers(0, 9, (n, 4)),
        }
        found.append(strategy.run(step, (strategy.per_replica(tree),)))
    for alone, beside in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(alone, beside)
    np.testing.assert_allclose(found[1][0]["f"], tree["f"].mean(0), rtol=1e-5)


def test_a_size_for_one_reduction_is_kept():
    strategy = asking(2, overlap=True, bytes_per_pack=4 * SIZE**2)

    def step(x):
        options = CommunicationOptions(bytes_per_pack=1000)
        return js.get_replica_context().all_reduce("sum", [x, x, x], options=options)

    jaxpr = replica_jaxpr(strategy, step, strategy.per_replica(np.ones((2, 64))))
    assert sum(eqn.primitive.name == "psum" for eqn in jaxpr.eqns) == 1


def test_replicas_on_tpus_take_options():
    options = CommunicationOptions(overlap=True, bytes_per_pack=4 * SIZE**2)
    strategy = js.TPUStrategy(communication_options=options)
    step = replica_jaxpr(strategy, gradient_step, parameters(), batches(strategy))
    assert products_before_sums(step) == [4 + 1, 4 + 2, 4 + 3, 4 + 4]


def replicas(platform, kind, count=8, processes=1):
    devices = tuple(
        SimpleNamespace(
            platform=platform, device_kind=kind, process_index=i % processes
        )
        for i in range(count)
    )
    return SimpleNamespace(count=count, devices=devices, all_devices=devices)


def test_each_platform_is_asked_for_what_it_can():
    gpu = overlap_on(replicas("gpu", "NVIDIA H100 80GB HBM3"), OVERLAP)
    bytes_of_pack = "xla_gpu_all_reduce_combine_threshold_bytes"
    assert gpu == Overlap(None, {bytes_of_pack: str(25 * 2**20)})
    sized = CommunicationOptions(overlap=True, bytes_per_pack=10**6)
    gpu = overlap_on(replicas("gpu", "NVIDIA A100"), sized)
    assert gpu.compiler_options == {bytes_of_pack: "1000000"}
    v5e, v6e, v5p = (
        overlap_on(replicas("tpu", kind), OVERLAP).compiler_options
        for kind in ("TPU v5 lite", "TPU v6 lite", "TPU v5p")
    )
    assert v5e["xla_enable_async_all_reduce"] == "true"
    assert v6e["xla_tpu_enable_sparse_core_collective_offload_all_reduce"] == "true"
    assert not v5p and "xla_enable_async_all_reduce" not in v6e
    cpu = overlap_on(replicas("cpu", "cpu"), sized)
    assert cpu == Overlap(Packing(10**6, 10**6, 10**6), {})


def test_nobody_is_asked_without_reason():
    assert overlap_on(replicas("tpu", "TPU v5 lite"), None) is None
    assert overlap_on(replicas("gpu", "any"), CommunicationOptions()) is None
    assert overlap_on(replicas("gpu", "any", count=1), OVERLAP) is None


def test_what_the_user_has_said_stays(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_enable_async_all_reduce=false")
    v5e = overlap_on(replicas("tpu", "TPU v5 lite"), OVERLAP).compiler_options
    assert "xla_enable_async_all_reduce" not in v5e and len(v5e) == 2


def test_the_compiler_is_asked(monkeypatch):
    asked = Overlap(None, {"xla_no_such_option": "1"})
    monkeypatch.setattr(strategy_module, "overlap_on", lambda *_: asked)
    strategy = asking(2)
    x = strategy.per_replica(np.ones((2, 3)))

    def total(x):
        return js.get_replica_context().all_reduce("sum", x)

    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        strategy.run(total, (x,))


@each_of("is_first", [True, False])
def test_inside_another_program_its_options_hold(monkeypatch, is_first):
    asked = Overlap(None, {"xla_cpu_enable_fast_math": "False"})
    monkeypatch.setattr(strategy_module, "overlap_on", lambda *_: asked)
    strategy = asking(2)
    x = strategy.per_replica(np.ones((2, 3)))

    def total(x):
        return js.get_replica_context().all_reduce("sum", x)

    if not is_first:
        np.testing.assert_array_equal(strategy.run(total, (x,)), [2.0, 2.0, 2.0])
    found = jax.jit(lambda x: strategy.run(total, (x,)))(x)
    np.testing.assert_array_equal(found, [2.0, 2.0, 2.0])


def test_one_reduction_cannot_overlap():
    strategy = asking(2)
    x = strategy.per_replica(np.ones((2, 3)))
    told = re.escape(
        "`overlap=True` was given in the options of one reduction; the compiler can be "
        "asked for it once for a whole program only. Give it to the strategy: "
        "`MirroredStrategy(communication_options=CommunicationOptions(overlap=True))`."
    )
    with pytest.raises(ValueError, match=told):
        strategy.reduce("sum", x, options=OVERLAP)
    with pytest.raises(ValueError, match=told):
        strategy.run(
            lambda x: js.get_replica_context().all_reduce("sum", x, options=OVERLAP),
            (x,),
        )


def test_it_is_a_bool():
    with pytest.raises(TypeError, match="`overlap` was 1; a bool was wanted."):
        CommunicationOptions(overlap=1)


# Small arrays are reduced in packs, and no bit changes.


@pytest.mark.slow
def test_packs_change_no_bit():
    packed, plain = on(3, js.NcclAllReduce(3)), on(3, js.NcclAllReduce(0))
    tree = stacked(3)

    def step(tree):
        both = [replica().all_reduce(op, tree) for op in ("sum", "mean")]
        few = ordered(tree)
        return both, [replica().all_reduce(op, few) for op in ("min", "max")]

    out = packed.run(step, (packed.per_replica(tree),))
    assert all(isinstance(leaf, js.Mirrored) for leaf in jax.tree.leaves(out))
    assert_same_bits(out, plain.run(step, (plain.per_replica(tree),)))


def test_a_step_reduces_once_for_each_dtype_and_each_large_array(four):
    tree = four.per_replica(stacked(4))

    def step(tree):
        return replica().all_reduce("sum", tree)

    assert collectives(four, step, tree) == [
        ("psum", "float32", 4 * (15 + 1 + 7 + 4)),  # with the bfloat16 ones
        ("psum", "float32", 4 * 300 * 300),
        ("psum", "int32", 4 * 6),
        ("psum", "uint8", 2),
        ("psum", "complex64", 8 * 3),
    ]


def test_the_strategy_or_the_call_says_how_much_is_packed(four):
    tree = four.per_replica({"x": np.ones((4, 10, 8), np.float32)})
    leaves = [tree["x"]] * 6  # of 320 bytes

    def times(strategy, **options):
        def step(leaves):
            chosen = CommunicationOptions(**options) if options else None
            return replica().all_reduce("sum", leaves, chosen)

        return len(collectives(strategy, step, leaves))

    assert times(four) == 1
    assert times(four, bytes_per_pack=640) == 3
    assert times(four, bytes_per_pack=319) == 6
    limited = on(4, options=CommunicationOptions(bytes_per_pack=960))
    assert times(limited) == 2
    assert times(limited, bytes_per_pack=320) == 6
    assert times(limited, reduce_dtype="bfloat16") == 1  # half as much
    assert [times(on(4, js.NcclAllReduce(k))) for k in (0, 1, 2, 9)] == [6, 1, 2, 6]
    assert times(on(4, js.NcclAllReduce(1)), bytes_per_pack=640) == 3


def _kernels(text):
    """The different fused computations of a compiled program, without names."""
    found = set()
    for computation in text.split("\n\n"):
        first, *lines = computation.split("\n")
        if first.startswith("%") and "fus" in first.split(" ")[0]:
            plain = re.sub(r", metadata=\{[^}]*\}", "", "\n".join(lines))
            found.add(re.sub(r"%[\w.\-]+", "%x", plain))
    return found


def test_parts_of_one_size_are_cut_by_one_kernel(four):
    def kernels(number):
        shapes = [(4, 8, 8), (4, 8)] * number
        tree = four.per_replica(tuple(np.ones(shape, np.float32) for shape in shapes))

        def step(tree):
            means = replica().all_reduce("mean", tree)
            return [2 * mean + 1 for mean in means]

        whole = jax.jit(lambda tree: four.run(step, (tree,)))
        return _kernels(whole.lower(tree).compile().as_text())

    few, many = kernels(6), kernels(12)
    assert len(few) < 6  # not one for each array
    assert len(many) == len(few)
