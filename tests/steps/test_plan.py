"""What `js.plan` says of layouts, against the step compiled by hand."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxstrategy as js
from jaxstrategy import planning

SIDE, ROWS, RATE = 512, 64, 0.1
DONATE = js.RunOptions(donate_argnums=0)
BATCH = jax.ShapeDtypeStruct((ROWS, SIDE), np.float32)
OPTIMIZER, STATE = js.StateSharding("optimizer"), js.StateSharding("state")


def build():
    return {"w": jnp.ones((SIDE, SIDE)) / SIDE, "m": jnp.zeros((SIDE, SIDE))}


def loss_of(w, x):
    return ((x @ w) ** 2).mean()


def step(state, x):
    loss, grad = jax.value_and_grad(loss_of)(state["w"], x)
    loss, grad = js.get_replica_context().all_reduce("mean", (loss, grad))
    m = 0.9 * state["m"] + grad
    return {"w": state["w"] - RATE * m, "m": m}, loss


def step_in_parts(state, x, accumulate=1):
    @js.get_strategy().accumulate(accumulate)
    def gradient(x):
        hidden = lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean()  # noqa: E731
        return jax.grad(hidden)(state["w"])

    grad = js.get_replica_context().all_reduce("mean", gradient(x))
    return {"w": state["w"] - RATE * grad, "m": state["m"] + grad}


def by_name(plan):
    return {layout.name: layout for layout in plan}


@pytest.fixture(scope="module")
def plan():
    return js.plan(build, step, BATCH, memory="1GiB", options=DONATE)


def test_memory_is_that_of_the_step_compiled_by_hand(plan):
    types = jax.eval_shape(build)
    batch = js.PerReplica(jax.ShapeDtypeStruct((8, ROWS // 8, SIDE), np.float32))
    found = by_name(plan)
    for name, sharding in {
        "replicated": None,
        "sharding='optimizer'": OPTIMIZER,
        "sharding='state'": STATE,
    }.items():
        strategy = js.MirroredStrategy(sharding=sharding)
        by_hand = strategy.compile(step, (types, batch), options=DONATE).compiled
        wanted = by_hand.memory_analysis()
        memory = found[name].memory
        assert memory.arguments == wanted.argument_size_in_bytes
        assert memory.temporary == wanted.temp_size_in_bytes
        assert memory.peak == (
            wanted.argument_size_in_bytes
            + wanted.output_size_in_bytes
            - wanted.alias_size_in_bytes
            + wanted.temp_size_in_bytes
            + wanted.generated_code_size_in_bytes
        )
    whole = SIDE * SIDE * 4
    bytes_of = {name: layout.state_bytes for name, layout in found.items()}
    assert bytes_of == {
        "replicated": 2 * whole,
        "sharding='optimizer'": whole + whole // 8,
        "sharding='state'": 2 * whole // 8,
    }


def on_first_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def test_each_layout_trains_in_the_memory_it_tells_and_a_plan_allocates_nothing():
    before = len(jax.live_arrays())
    plan = js.plan(build, step, BATCH, memory="1GiB", options=DONATE)
    assert len(jax.live_arrays()) == before
    rows = np.random.default_rng(0).normal(size=(ROWS, SIDE)).astype(np.float32)
    for layout in plan:
        strategy = layout.strategy()
        state = strategy.init(build)
        x = strategy.per_replica(rows.reshape(8, ROWS // 8, SIDE))
        state, _ = layout.step(strategy)(state, x)
        assert on_first_device(state) == layout.state_bytes
        assert on_first_device((state, x)) == layout.memory.arguments
        np.testing.assert_allclose(js.to_host(state["w"]), by_numpy(rows), atol=1e-5)


def by_numpy(x):
    w = np.ones((SIDE, SIDE)) / SIDE
    return w - RATE * 2 * x.T @ (x @ w) / x.shape[0] / SIDE


def test_what_fits_is_first_and_what_cannot_is_not_compiled():
    plan = js.plan(build, step, BATCH, memory="1.9MiB", options=DONATE)
    assert [layout.fits for layout in plan] == [True, False, False]
    # Then by what is missing, and last what was not compiled.
    kinds = ("sharding='state'", "sharding='optimizer'", "replicated")
    assert tuple(layout.name for layout in plan) == kinds
    best, *others = plan
    assert best is plan.best and best.arguments == {"sharding": STATE}
    assert best.left == 1.9 * 2**20 // 1 - best.memory.peak
    assert best.limited_by in best.seconds and best.reason == ""
    replicated = by_name(plan)["replicated"]
    assert replicated.memory is None and replicated.reason == (
        "the state alone takes 2 MiB"
    )
    assert replicated.step_seconds == float("inf") and replicated.limited_by == "memory"
    text = str(plan)
    assert text.splitlines()[0] == "Plan of `step` on 8 cpu of 1.9 MiB"
    assert "`sharding='state'` is the only layout that fits." in text
    assert [text.count(layout.name) for layout in others] == [1, 1]
    assert "the state alone takes 2 MiB" in plan._repr_html_()


def test_a_plan_on_one_device_says_that_there_is_one_replica():
    device = jax.devices()[:1]
    plan = js.plan(build, functools.partial(step), BATCH, devices=device, memory="1GiB")
    assert str(plan).startswith("Plan of `step` on 1 cpu of 1 GiB\n")
    assert by_name(plan)["sharding='state'"].reason == "there is one replica"
    with pytest.raises(ValueError, match="How much memory 1 cpu has is not known"):
        js.plan(build, step, BATCH, devices=device)


@pytest.mark.slow
def test_parts_of_a_batch_where_the_whole_does_not_fit():
    batch = jax.ShapeDtypeStruct((8 * 1024, SIDE), np.float32)
    plans = {
        memory: js.plan(build, step_in_parts, batch, memory=memory, options=DONATE)
        for memory in ("1GiB", "8MiB")
    }
    assert all(layout.accumulate == 1 for layout in plans["1GiB"])
    found = [layout for layout in plans["8MiB"] if layout.accumulate > 1]
    assert found and all(layout.memory.temporary for layout in found)
    best = plans["8MiB"].best
    assert best.accumulate > 1 and f"accumulate={best.accumulate}" in best.name
    whole = by_name(plans["1GiB"])
    for layout in found:
        alike = whole[re.sub(r"(, )?accumulate=\d+", "", layout.name) or "replicated"]
        assert layout.memory.peak < alike.memory.peak
        assert layout.step_seconds >= alike.step_seconds
    strategy = best.strategy()
    x = np.random.default_rng(0).normal(size=batch.shape).astype(np.float32)
    parts = strategy.per_replica(x.reshape(8, 1024, SIDE))
    state = best.step(strategy)(strategy.init(build), parts)
    once = js.MirroredStrategy(["CPU:0"])
    wanted = once.run(step_in_parts, (build(), once.per_replica(x[None])))
    np.testing.assert_allclose(js.to_host(state["w"]), wanted["w"], atol=1e-6)


@pytest.mark.slow
def test_parts_are_divisors_of_the_rows_of_a_replica():
    for rows, advice in ((1035, ""), (1033, "- Rows with more divisors, or `jax.chec")):
        batch = jax.ShapeDtypeStruct((8 * rows, SIDE), np.float32)
        plan = js.plan(build, step_in_parts, batch, memory="8MiB", options=DONATE)
        assert plan[0].fits is (not advice) and advice in str(plan)
        if plan[0].fits:
            assert plan.best.accumulate > 1 and rows % plan.best.accumulate == 0


def test_several_steps_in_a_call_where_calls_take_most_of_a_step():
    def tiny():
        return {"w": jnp.zeros((4, 4)), "m": jnp.zeros((4, 4))}

    batch = jax.ShapeDtypeStruct((16, 4), np.float32)
    plan = js.plan(tiny, step, batch, memory="1GiB", topology=links(1e12, 1e-9))
    best = plan.best
    assert best.several == 8 and best.name == "several=8"
    one = by_name(plan)["replicated"]
    assert by_name(plan)["sharding='state'"].reason == (
        "no array of the state is large enough to be divided"
    )
    assert best.seconds["calls"] == one.seconds["calls"] / 8
    for each in ("operations", "memory traffic", "communication"):
        assert best.seconds[each] == one.seconds[each]
    strategy = best.strategy()
    x = strategy.per_replica(np.ones((8, 2, 4), np.float32))
    _, losses = best.step(strategy)(strategy.init(tiny), (x,) * 8)
    assert losses.shape == (8,)


def links(bandwidth=1e9, latency=1e-5, replicas=8):
    return js.profiling.Topology(bandwidth, latency, replicas)


def over(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.Dense(1024, kernel_init=over(None, "core"))(x))
        return nn.Dense(64, kernel_init=over("core", None))(y)


@pytest.mark.slow
def test_logical_axes_of_an_annotated_model():
    model, optimizer = Annotated(), optax.adam(1e-3)

    def build_flax(key):
        params = model.init(key, jnp.zeros((1, 64)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def train(state, x):
        grads = jax.grad(lambda p: (model.apply(p, x) ** 2).mean())(state.params)
        grads = js.get_replica_context().all_reduce("mean", grads)
        return state.apply_gradients(grads=grads)

    def build_one():
        return build_flax(jax.random.key(0))

    batch = jax.ShapeDtypeStruct((16, 64), np.float32)
    devices = jax.devices()[:4]
    plan = js.plan(
        build_one, train, batch, devices=devices, memory="1GiB", options=DONATE
    )
    sizes = [layout.arguments.get("logical_axes") for layout in plan]
    assert all(sizes.count(each) >= 3 for each in (None, {"core": 2}, {"core": 4}))
    found = by_name(plan)
    strategy = js.MirroredStrategy(devices, logical_axes={"core": 4})
    state = strategy.init(build_one)
    number = 4  # of steps, in Python
    at_rest = on_first_device((state.params, state.opt_state)) + number
    assert found["logical_axes={'core': 4}"].state_bytes == at_rest
    best = plan.best
    strategy = best.strategy()
    state, n = strategy.init(build_one), strategy.num_replicas_in_sync
    x = strategy.per_replica(np.ones((n, 16 // n, 64), np.float32))
    best.step(strategy)(state, (x,) * best.several if best.several > 1 else x)
    explained = found["logical_axes={'core': 4}"].explain(compiled=False)
    assert explained.logical_axes == {"core": 4} and explained.num_replicas == 1


def test_specs_divide_what_is_not_annotated():
    specs = {"w": jax.P(None, "core"), "m": jax.P(None, "core")}
    plan = js.plan(build, step, BATCH, memory="1GiB", specs=specs)
    assert "logical_axes={'core': 8}" in by_name(plan)


def test_states_and_batches_as_users_have_them():
    strategy = js.MirroredStrategy()

    @strategy.run(options=js.RunOptions(donate_argnums=(0, 1)))
    def train(w, m, batch):
        x, y = batch
        grad = jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w)
        m = m + js.get_replica_context().all_reduce("mean", grad)
        return w - m, m

    types = (jax.ShapeDtypeStruct((SIDE, SIDE), np.float32),) * 2
    rows = np.zeros((ROWS + 1, SIDE), np.float32)  # which are filled up
    dataset = strategy.experimental_distribute_dataset([(rows, rows)])
    for batch in ((rows, rows), dataset.element_spec):
        plan = js.plan(types, train, batch, memory="1GiB")
        memory = by_name(plan)["replicated"].memory
        filled = 2 * (ROWS // 8 + 1) * SIDE * 4
        assert memory.arguments == 2 * SIDE * SIDE * 4 + filled
        assert memory.donated == 2 * SIDE * SIDE * 4


@pytest.mark.slow
def test_advice_where_nothing_fits_holds():
    def in_one_part(state, x):
        return step_in_parts(state, x)

    batch = jax.ShapeDtypeStruct((8 * 1024, SIDE), np.float32)
    plan = js.plan(build, in_one_part, batch, memory="8MiB", options=DONATE)
    assert not any(layout.fits for layout in plan)
    with pytest.raises(ValueError, match=r"No layout fits into 8 MiB\.\nThe least is"):
        plan.best  # noqa: B018
    advice = "\n".join(plan.advice)
    (rows,) = re.findall(r"- (\d+) rows in place of 8192: ", advice)
    fewer = jax.ShapeDtypeStruct((int(rows), SIDE), np.float32)
    assert js.plan(build, in_one_part, fewer, memory="8MiB", options=DONATE).best.fits
    assert re.search(
        r"`jax.checkpoint` around layers: .* MiB grow with the rows", advice
    )
    (devices,) = re.findall(r"- (\d+) devices in place of 8, about\.", advice)
    # As many rows on each device as so many devices would have.
    few = jax.ShapeDtypeStruct((8 * 1024 * 8 // int(devices), SIDE), np.float32)
    assert js.plan(build, in_one_part, few, memory="8MiB", options=DONATE).best.fits
    assert "donate_argnums" not in advice
    assert "No layout fits into 8 MiB." in str(plan)


def test_advice_where_memory_is_not_donated_and_not_even_the_state_fits():
    plan = js.plan(build, step, BATCH, memory="1MiB")
    assert "`options=js.RunOptions(donate_argnums=0)`: a step reuses" in plan.advice[1]
    plan = js.plan(build, step, BATCH, memory="100kB", options=DONATE)
    assert all(layout.memory is None for layout in plan)
    with pytest.raises(ValueError, match="of which the state takes 256 KiB"):
        plan.best  # noqa: B018


def test_machines_by_numbers():
    machine = planning.describe("H100", count=8)
    assert (machine.memory, machine.flops) == (80 * 10**9, 989e12)
    assert machine.topology.replicas == 8 and not machine.is_here
    assert str(machine) == "8 H100 of 74.5 GiB"
    slow = planning.describe(
        "A100", count=2, memory="40GB", topology=links(1e9, 1e-6, 2)
    )
    assert (slow.memory, slow.topology) == (40 * 10**9, links(1e9, 1e-6, 2))
    plan = js.plan(build, step, BATCH, devices=machine, options=DONATE)
    assert by_name(plan)["replicated"].fits
    with pytest.raises(ValueError, match="8 H100 of 74.5 GiB, which are not here"):
        plan.best.strategy()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"what": "X1", "count": 8}, ValueError, "`memory` of 'X1' is not known. Give"),
        ({"count": 8, "memory": 1}, ValueError, "`flops` of 'devices' is not known"),
        ({"what": "H100", "count": 9}, ValueError, r"Call `js.simulate\(9\)` before"),
        ({"count": 1.5}, TypeError, "`count` was 1.5; a whole number was wanted"),
        ({"flops": -1}, ValueError, "`flops` was -1; a positive number was wanted"),
        ({"memory": "much"}, ValueError, "`memory` was 'much'; the bytes of one"),
        ({"memory": 1.5}, TypeError, "`memory` was 1.5; the bytes of one device"),
        ({"what": "v5x-8"}, ValueError, "'v5x-8'; a slice of TPUs is written as"),
        ({"topology": links(replicas=3)}, ValueError, "that of 3 replicas, but there"),
        ({"topology": 3}, TypeError, "`topology` was 3; a `js.profiling.Topology`"),
    ],
)
def test_wrong_machines(arguments, error, text):
    with pytest.raises(error, match=text):
        planning.describe(**arguments)


def test_a_slice_of_tpus_needs_libtpu():
    try:
        import libtpu  # noqa: F401
    except ImportError:
        with pytest.raises(RuntimeError, match="XLA cannot compile for 'v5e-8' here"):
            planning.describe("v5e-8")
        return
    machine = planning.describe("v5e-8")
    assert machine.memory == 16 * 2**30 and machine.topology.replicas == 8
    assert js.plan(build, step, BATCH, devices=machine, options=DONATE).best.fits


def test_the_picture_has_a_bar_of_memory_and_a_bar_of_time_for_each_layout(plan):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    left, right = plan.plot().axes
    names = [label.get_text() for label in left.get_yticklabels()][::-1]
    assert names == [layout.name for layout in plan]
    peaks = [bar.get_width() * 2**20 for bar in left.patches][::-1]
    assert peaks == [layout.memory.peak for layout in plan]
    times = [bar.get_width() / 1e3 for bar in right.containers[0]][::-1]
    np.testing.assert_allclose(times, [layout.step_seconds for layout in plan])


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import jaxstrategy as js

def step(w, x):
    return w - js.get_replica_context().all_reduce("mean", (w * x).mean(0))

def planned():
    return lambda: jnp.zeros(8), step, np.ones((16, 8), np.float32)
"""


@pytest.mark.slow
def test_the_command_prints_a_plan(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "jaxstrategy.planning", "train:planned"]
    done = subprocess.run(
        [*command, "--simulate", "4", "--memory", "1MiB"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(js.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan of `step` on 4 cpu of 1 MiB\n")
    assert "no array of the state is large enough to be divided" in done.stdout


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("train", "'train' is not module:function"),
        ("trian:planned", "there is no module 'trian'"),
        ("train:plan", "module 'train' has no function 'plan'"),
        ("train:two", "'train:two' returned (1, 2); the arguments of `js.plan`"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_function(
    function, text, tmp_path, monkeypatch, capsys
):
    from jaxstrategy.planning import __main__ as command

    (tmp_path / "train.py").write_text(f"{PROGRAM}\ndef two():\n    return 1, 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["planning", function])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"step": 3}, TypeError, "`plan` was given 3 as the step, which cannot"),
        ({"memory": None}, ValueError, "How much memory 8 cpu have is not known"),
        ({"memory": "many"}, ValueError, "`memory` was 'many'; the bytes of one"),
        ({"memory": "0.5"}, ValueError, "`memory` was '0.5'; the bytes of one"),
        ({"memory": "9" * 400}, ValueError, "`memory` was '9999"),
        ({"batch": {"x": 3}}, ValueError, r"`batch\['x'\]` was 3; an array of shape"),
        ({"batch": {"x": None}}, ValueError, "whose arrays have no rows. One array"),
        ({"batch": np.zeros((0, SIDE))}, ValueError, "an array of shape"),
        ({"batch": [np.ones(8), np.ones(4)]}, ValueError, "arrays have 4 or 8 rows"),
        ({"batch": np.array(["a"] * 8)}, TypeError, "`batch` was array.*JAX can hold"),
        ({"build": "model"}, TypeError, "`build` was 'model'; an array that JAX can"),
        ({"build": lambda key: key}, TypeError, r"such as `functools.partial\(build"),
        ({"specs": 3}, TypeError, r"`specs` for `result\['m'\]` is 3; a `jax.shard"),
        ({"devices": []}, ValueError, "An empty list of devices was given"),
        ({"devices": js.MirroredStrategy}, TypeError, "`devices` was <class"),
        ({"topology": links(replicas=4)}, ValueError, "that of 4 replicas, but there"),
    ],
)
def test_wrong_plans(changed, error, text):
    arguments = {"build": build, "step": step, "batch": BATCH, "memory": "1GiB"}
    with pytest.raises(error, match=text):
        js.plan(**arguments | changed)


def test_the_current_strategy_changes_nothing(plan):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        inside = js.plan(build, step, BATCH, memory="1GiB", options=DONATE)
        assert str(inside[0].explain()) == str(plan[0].explain())
    assert str(inside) == str(plan)
    with pytest.raises(js.errors.ContextError, match="`plan` was called in a step"):
        strategy.run(lambda x: js.plan(build, step, BATCH) and x, (1.0,))


def test_what_the_step_raises_in_every_layout_is_raised():
    def wrong(state, x):
        raise KeyError("a mistake of the user's")

    with pytest.raises(KeyError, match="a mistake of the user's"):
        js.plan(build, wrong, BATCH, memory="1GiB")


def test_what_is_not_possible_in_one_layout_is_told_of_it():
    def only_whole(state, x):
        assert not js.get_strategy()._replicas.state_sharding, "not for parts"
        return step(state, x)

    plan = js.plan(build, only_whole, BATCH, memory="1GiB")
    assert by_name(plan)["sharding='state'"].reason == (
        "not possible: AssertionError: not for parts"
    )
    assert plan.best.arguments == {}
