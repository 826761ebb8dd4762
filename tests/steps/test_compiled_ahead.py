"""Steps that are compiled before they are called: the same numbers, or why not."""

import contextlib
import hashlib
import json
import os
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from helpers.cases import each, each_of

import jaxstrategy as js
from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.strategies import strategy as strategy_module

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3) / 10
START = np.array([0.5, -1.0, 2.0], np.float32)
DEVICES = jax.devices()


@contextlib.contextmanager
def compilations():
    """The names of the programs that XLA compiles in the block."""
    found, is_open = [], [True]

    def replies(event, seconds, **told):
        if is_open and event == "/jax/core/compile/backend_compile_duration":
            found.append(told.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(replies)
    yield found
    is_open.clear()


def step(w, batch):
    """`w` after a step of gradient descent on `mean((w . row) ** 2)`."""
    grad = jax.grad(lambda w: js.masked_mean((batch @ w) ** 2))(w)
    grad = js.get_replica_context().all_reduce("mean", grad)
    return w - 0.1 * grad, batch.sum()


def stepped(w):
    """The same by NumPy."""
    return w - 0.1 * (2 * ROWS * (ROWS @ w)[:, None]).mean(0)


def replicas(count=4, **more):
    return js.MirroredStrategy(DEVICES[:count], **more)


LAYOUTS = {
    "four replicas": lambda: replicas(),
    "lanes": lambda: replicas(2, replicas_per_device=2),
    "sharded state": lambda: replicas(
        4, sharding=js.StateSharding("state", min_bytes=0)
    ),
}


def batches_of(strategy):
    return strategy.experimental_distribute_dataset(js.batches(ROWS, 8))


@each_of("layout", list(LAYOUTS))
def test_a_step_compiled_for_types_does_what_the_step_does(layout, tmp_path):
    strategy = LAYOUTS[layout]()
    dataset = batches_of(strategy)
    types = jax.ShapeDtypeStruct(START.shape, START.dtype), dataset.element_spec
    train = strategy.compile(step, types)
    train.save(tmp_path / layout)
    (batch,) = dataset
    w, own = train(START, batch)
    np.testing.assert_allclose(w, stepped(START), rtol=1e-5)
    sums = [local.sum() for local in np.split(ROWS, strategy.num_replicas_in_sync)]
    own = jax.tree.leaves(own)[0]
    np.testing.assert_allclose(own.reshape(-1), sums, rtol=1e-6)
    with compilations() as compiled:
        again = strategy.load_compiled(tmp_path / layout, step, types)
        w, _ = again(w, batch)
    np.testing.assert_allclose(w, stepped(stepped(START)), rtol=1e-5)
    assert "jit(step)" not in compiled


def test_a_saved_step_has_its_variables_and_overwrites_what_is_donated(tmp_path):
    strategy = replicas()
    with strategy.scope():
        total = js.Variable(np.zeros(3, np.float32), name="total")
        js.Variable(7.0, name="unused")

    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def add(w, x):
        total.assign_add(js.get_replica_context().all_reduce("sum", x) * w)
        return {"w": 2 * w, "label": "twice"}

    x = strategy.per_replica([START] * 4)
    types = jax.ShapeDtypeStruct((3,), np.float32), x
    strategy.compile(add, types).save(tmp_path / "add")
    with strategy.scope():
        js.Variable(8.0, name="made since, and unused")
    loaded = strategy.load_compiled(tmp_path / "add", add, types)
    w = strategy.mirror(START)
    found = loaded(w, x)
    assert found["label"] == "twice" and w.is_deleted()
    np.testing.assert_allclose(found["w"], 2 * START)
    loaded(found["w"], x)
    np.testing.assert_allclose(total[...], 4 * START * (START + 2 * START), rtol=1e-6)


def test_a_train_state_is_compiled_from_its_types_and_loaded(tmp_path):
    strategy = replicas(2)
    model, optimizer = nn.Dense(1), optax.sgd(0.1)

    def create(optimizer=optimizer, model=model):
        params = model.init(jax.random.key(0), ROWS)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    @strategy.run
    def train(state, rows):
        def loss(params):
            return (state.apply_fn(params, rows) ** 2).mean()

        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(
            grads=js.get_replica_context().all_reduce("mean", grads)
        )

    rows = strategy.per_replica([ROWS[:4], ROWS[4:]])
    types = jax.eval_shape(create), rows
    strategy.compile(train, types).save(tmp_path / "train")
    loaded = strategy.load_compiled(tmp_path / "train", train, types)
    state = strategy.init(create)
    state = loaded(loaded(state, rows), rows)
    assert isinstance(state, TrainState) and state.step == 2
    wanted = train(train(strategy.init(create), rows), rows)
    jax.tree.map(np.testing.assert_array_equal, state.params, wanted.params)
    told = "A model or an optimizer that is made anew is another one: make it once"
    with pytest.raises(js.errors.CompiledStepError, match=told):
        loaded(strategy.init(lambda: create(optax.sgd(0.1))), rows)
    with pytest.raises(js.errors.CompiledStepError, match=told):  # printed the same
        loaded(strategy.init(lambda: create(model=nn.Dense(1))), rows)


def test_arguments_that_lie_otherwise_are_refused():
    sharding = js.StateSharding("optimizer")
    strategy = js.MirroredStrategy(jax.devices()[:2], sharding=sharding)
    weights = np.zeros((8, 4096), np.float32)
    total = strategy.compile(lambda w: w.sum(), (weights,))
    mesh = strategy.mirror(weights).sharding.mesh
    rows = jax.sharding.NamedSharding(mesh, jax.P("replica"))
    told = r"4096\], P\('replica',\), and the step is compiled for .*, P\(\)\. Call"
    with pytest.raises(js.errors.CompiledStepError, match=told):
        total(jax.device_put(weights, rows))
    assert total(weights) == 0


def test_several_steps_are_compiled_and_loaded(tmp_path):
    strategy = replicas(2)
    many = strategy.several(strategy.run(step))
    spec = batches_of(strategy).element_spec
    types = jax.ShapeDtypeStruct((3,), np.float32), (spec, spec)
    strategy.compile(many, types).save(tmp_path / "many")
    (batch,) = batches_of(strategy)
    loaded = strategy.load_compiled(tmp_path / "many", many, types)
    w, _ = loaded(START, (batch, batch))
    np.testing.assert_allclose(w, stepped(stepped(START)), rtol=1e-5)
    with pytest.raises(js.errors.CompiledStepError, match="compiled ahead of time for"):
        loaded(START, (batch,))


def test_objects_and_captured_arrays_are_what_they_are_at_each_call(tmp_path):
    strategy = replicas(2)
    rate = jnp.float32(0.5)

    class Counter(nnx.Module):
        def __init__(self):
            self.total = nnx.Variable(jnp.zeros(3))

    def count(counter, x):
        counter.total[...] += rate * js.get_replica_context().all_reduce("sum", x)

    x = strategy.per_replica([START, START])
    strategy.compile(count, (Counter(), x)).save(tmp_path / "count")
    counter, rate = Counter(), jnp.float32(0.25)
    loaded = strategy.load_compiled(tmp_path / "count", count, (counter, x))
    loaded(counter, x)
    rate = jnp.float32(2.0)
    loaded(counter, x)
    np.testing.assert_allclose(counter.total[...], (0.5 + 4.0) * START, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")
def test_it_is_called_wherever_a_step_is():
    strategy = replicas(2)
    compiled = strategy.compile(step, (START, strategy.per_replica([ROWS, ROWS])))
    x = strategy.per_replica([ROWS, ROWS])
    for block in (strategy.scope(), js.experimental.eager_replicas()):
        with block:
            w, _ = compiled(START, x)
        np.testing.assert_allclose(w, stepped(START), rtol=1e-5)
    with compilations() as found:
        w, _ = strategy.run(compiled, (START, x))
    np.testing.assert_allclose(w, stepped(START), rtol=1e-5)
    assert found == [], "its program is there"
    assert repr(compiled) == "<step compiled ahead of time>"
    assert "w" in step.__code__.co_varnames and compiled.__name__ == "step"
    assert compiled.compiled.cost_analysis() is not None
    with replicas(1).scope(), pytest.raises(js.errors.ContextError, match="scope"):
        compiled(START, x)


@pytest.fixture(scope="module")
def compiled():
    strategy = replicas(2)
    spec = batches_of(strategy).element_spec
    w = jax.ShapeDtypeStruct((3,), np.float32)
    (batch,) = batches_of(strategy)
    return strategy, strategy.compile(step, (w, spec)), batch


OTHERS = [
    (np.zeros(4, np.float32), r"Argument `w` of `step` is float32\[4\], and the step "
     r"is compiled for float32\[3\]. Call it with what"),
    (np.zeros(3, np.int32), r"Argument `w` of `step` is int32\[3\]"),
    (jnp.full(3, 1.0), r"is float32\[3\], of the weak type of a Python number, and"),
    ([1.0, 2.0, 3.0], "for other arguments: their structure was PyTreeDef.*and is"),
    ("w", "`w` was an array or number, the same on all replicas, and is 'w'"),
]  # fmt: skip


def test_another_argument_is_told_by_name(compiled):
    _, train, batch = compiled
    for w, text in each(OTHERS):
        with pytest.raises(js.errors.CompiledStepError, match=text):
            train(w, batch)
        train(START, batch)  # and nothing was lost


def test_a_smaller_last_batch_of_one_replica_is_refused_with_the_way_out():
    strategy = replicas(1)

    def means(remainder):
        dataset = strategy.experimental_distribute_dataset(
            js.batches(np.arange(5.0, dtype="f"), 2),
            js.InputOptions(remainder=remainder),
        )
        mean = strategy.compile(lambda x: x.mean(), (dataset.element_spec,))
        return [float(mean(batch)) for batch in dataset]

    with pytest.raises(js.errors.CompiledStepError, match=(
        r"is float32\[1\], and the step is compiled for float32\[2\].* last batch may "
        r"have fewer rows.*`js.InputOptions\(remainder=\"drop\"\)` leaves it out"
    )):  # fmt: skip
        means("pad")
    assert means("drop") == [0.5, 2.5]


def test_what_else_it_captures_may_not_change():
    strategy = replicas(2)
    power = 2

    def raised(x):
        return js.get_replica_context().all_reduce("sum", x**power)

    compiled = strategy.compile(raised, (np.float32(3),))
    assert compiled(np.float32(3)) == 18
    power = 3
    for _ in range(2):
        with pytest.raises(
            js.errors.CompiledStepError, match="what it captures has changed"
        ):
            compiled(np.float32(3))
    power = 2
    assert compiled(np.float32(3)) == 18


def test_a_step_that_is_one_only_by_its_strategy_is_refused(tmp_path):
    strategy = replicas(2)
    with pytest.raises(TypeError, match="`compile` was given 3, which cannot be call"):
        strategy.compile(3)
    with pytest.raises(TypeError, match="`load_compiled` was given 3"):
        strategy.load_compiled(tmp_path / "none", 3)
    with pytest.raises(TypeError, match="`args` was a float"):
        strategy.compile(step, 1.0)
    with pytest.raises(FileNotFoundError):
        strategy.load_compiled(tmp_path / "none", step, (START, ROWS))
    with pytest.raises(js.errors.CompiledStepError, match=r"'\\ud800' is no path: "):
        strategy.load_compiled("\ud800", step, (START, ROWS))

    def inside(x):
        strategy.compile(step, (x,))

    with pytest.raises(js.errors.ContextError, match="`strategy.compile` was called"):
        strategy.run(inside, (START,))


def double(x):
    return js.get_replica_context().all_reduce("sum", 2 * x)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    strategy, path = replicas(2), tmp_path_factory.mktemp("kept") / "double"
    strategy.compile(double, (START,)).save(path)
    return strategy, path


@pytest.fixture
def saved(kept, tmp_path):
    """A strategy, and a file of its own for each test."""
    strategy, path = kept
    return strategy, shutil.copy(path, tmp_path / "double")


def test_a_file_is_its_owners_alone(saved):
    _, path = saved
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["double"]


def triple(x):
    return js.get_replica_context().all_reduce("sum", 3 * x)


def test_a_captured_constant_is_a_part_of_the_step(tmp_path):
    strategy = replicas(2)

    def scaled(by):
        return lambda x: js.get_replica_context().all_reduce("sum", by * x)

    strategy.compile(scaled(START), (START,)).save(tmp_path / "scaled")
    with pytest.raises(js.errors.CompiledStepError, match="computes something else no"):
        strategy.load_compiled(tmp_path / "scaled", scaled(2 * START), (START,))


def test_arguments_of_other_names_in_another_order_are_refused(tmp_path):
    """Of which the same one by name is donated, and another one by its place."""
    strategy, path = replicas(2), tmp_path / "step"

    def first(a, b):
        return a - b, 2 * a

    def second(b, a):
        return b - a, 2 * b

    donating = [js.RunOptions(donate_argnums=place) for place in (0, 1)]
    types = START, START
    strategy.compile(first, types, options=donating[0]).save(path)
    with pytest.raises(js.errors.CompiledStepError, match=(
        "the order of its inputs was 'argument `a`, argument `b`', and is 'argument "
        "`b`, argument `a`'. Compile and save it again."
    )):  # fmt: skip
        strategy.load_compiled(path, second, types, options=donating[1])


def test_other_options_of_the_compiler_are_refused(tmp_path, monkeypatch):
    """By which reductions go beside the computation on some platforms."""

    def asking(answer):
        overlap = Overlap(None, {"xla_cpu_enable_fast_min_max": answer})
        monkeypatch.setattr(strategy_module, "overlap_on", lambda *_: overlap)
        return replicas(2)

    path = tmp_path / "double"
    asking("False").compile(double, (START,)).save(path)
    same = asking("False").load_compiled(path, double, (START,))
    np.testing.assert_array_equal(same(START), 4 * START)
    with pytest.raises(js.errors.CompiledStepError, match=(
        "the compiler's option xla_cpu_enable_fast_min_max was 'False', and is 'True'"
    )):  # fmt: skip
        asking("True").load_compiled(path, double, (START,))


def rewritten(path, **facts):
    """The file with other facts in its header, as another version writes it."""
    text = path.read_bytes()
    begin = text.index(b"\n") + 9
    end = begin + int.from_bytes(text[begin - 8 : begin], "little")
    header = json.loads(text[begin:end])
    header["facts"] |= facts
    del header["checksum"]
    checksum = hashlib.sha256(json.dumps(header).encode() + text[end:]).hexdigest()
    other = json.dumps(header | {"checksum": checksum}).encode()
    size = len(other).to_bytes(8, "little")
    path.write_bytes(text[: begin - 8] + size + other + text[end:])


FACTS = [
    "the version of jax", "the version of jaxstrategy", "the platform",
    "the processor", "the place of this process", "the environment's XLA_FLAGS",
]  # fmt: skip


def test_another_version_or_machine_is_refused(saved):
    strategy, path = saved
    text = path.read_bytes()
    for fact in each(FACTS):
        path.write_bytes(text)
        rewritten(path, **{fact: "another"})
        with pytest.raises(
            js.errors.CompiledStepError, match=f"{fact} was 'another', and is '"
        ):
            strategy.load_compiled(path, double, (START,))


def test_another_users_file_is_not_read(saved, monkeypatch):
    strategy, path = saved
    path.chmod(0o620)
    with pytest.raises(js.errors.CompiledStepError, match=(
        r"is not loaded: others may write it \(mode 620\), and a compiled step runs"
    )):  # fmt: skip
        strategy.load_compiled(path, double, (START,))
    path.chmod(0o600)
    strategy.load_compiled(path, double, (START,))
    os.chown(path, 12345, -1) if os.getuid() == 0 else None
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(js.errors.CompiledStepError, match=r"user \d+, this process to"):
        if os.stat(path).st_uid == 0:
            pytest.skip("root's files are trusted")
        strategy.load_compiled(path, double, (START,))


def test_a_damaged_file_is_told(saved):
    strategy, path = saved
    text = path.read_bytes()
    number = text.index(b'"num_added": ') + len(b'"num_added": ')
    wrong = r"damaged \(its checksum is wrong"
    for damaged, told in (
        (text[:-1] + bytes([text[-1] ^ 1]), wrong),
        (text[:number] + b"9" + text[number + 1 :], wrong),
        (text[:60], "is damaged"),
        (b"not one", "no compiled step of this version"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(js.errors.CompiledStepError, match=told):
            strategy.load_compiled(path, double, (START,))


def test_a_step_that_calls_python_is_compiled_and_not_saved(tmp_path, capsys):
    strategy = replicas(2)

    def told(x):
        jax.debug.print("x is {}", x[0])
        return double(x)

    compiled = strategy.compile(told, (START,))
    np.testing.assert_allclose(compiled(START), 4 * START)
    jax.effects_barrier()
    assert "replica 1: x is 0.5" in capsys.readouterr().out
    with pytest.raises(js.errors.CompiledStepError, match="`told` calls Python while"):
        compiled.save(tmp_path / "told")


def test_a_parameter_server_compiles_nothing_ahead():
    strategy = js.ParameterServerStrategy(
        js.cluster_resolver.SimpleClusterResolver(
            js.cluster_resolver.ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]}),
            task_type="chief",
        ),
        backend="threads",
    )
    with pytest.raises(NotImplementedError, match="compiles a step where it runs"):
        strategy.compile(double, (START,))


def test_only_a_strategy_makes_one():
    with pytest.raises(TypeError, match=(
        r"A `CompiledStep` was made with .*'here'.*: `strategy.compile\(step, args\)`"
    )):  # fmt: skip
        js.experimental.CompiledStep(step, (), {}, "here")


def test_what_takes_a_step_takes_one_that_is_compiled_ahead():
    strategy = replicas(2)
    x = strategy.per_replica([ROWS, ROWS])
    compiled = strategy.compile(step, (START, x))
    found = strategy.explain(compiled, (START, x), compiled=False)
    assert [each.nbytes for each in found.collectives] == [START.nbytes]
    w, _ = strategy.several(compiled)(START, (x, x))
    np.testing.assert_allclose(w, stepped(stepped(START)), rtol=1e-5)
    options = js.RunOptions(donate_argnums=0)
    w = strategy.mirror(START)
    strategy.run(compiled, (w, x), options=options)
    assert w.is_deleted(), "compiled anew, with these options"


def in_strict_mode(strategy, path):
    with jax.numpy_dtype_promotion("strict"):
        strategy.load_compiled(path, double, (START,))


def with_options(**options):
    options = js.RunOptions(**options)
    return lambda s, path: s.load_compiled(path, double, (START,), options=options)


OTHER_LOADS = [
    (lambda s, path: s.load_compiled(path, triple, (START,)),
     r"double' is not used for `triple`: the step computes something else now \(its "
     r"code, \w{16}, is \w{16}\). Compile and save it again."),
    (lambda s, path: s.load_compiled(path, double, (np.zeros(4, np.float32),)),
     r"argument `x` was float32\[3\], .*, and is float32\[4\], "),
    (with_options(donate_argnums=0), "and is float32.*, donated, "),
    (lambda _, path: replicas(4).load_compiled(path, double, (START,)),
     "the mesh was '2 replicas, replica=2', and is '4 replicas, replica=4'"),
    (lambda _, path: js.MirroredStrategy(DEVICES[2:4]).load_compiled(
        path, double, (START,)), "devices of the mesh was '0, 1'"),
    (in_strict_mode,
     "JAX's option jax_numpy_dtype_promotion was 'standard', and is 'strict'"),
    (with_options(check_finite=True), "besides was '.*', and is '.*Finite"),
]  # fmt: skip


@each_of("load, text", OTHER_LOADS)
def test_a_file_of_something_else_is_refused(saved, load, text):
    with pytest.raises(js.errors.CompiledStepError, match=text):
        load(*saved)


# Programs for TPUs and GPUs that are not there: what runs beside reductions.
