"""Programs in two processes of two devices each give what they give in one."""

import functools
import json
import os
import pickle
import re
import time
import traceback

import jax
import numpy as np
import pytest
import workers
from harness import job as started_job
from workers import checkpoints, conformance, digits, keras_models, layouts, sharded
from workers.divided_variables import WHOLE, trained, variables

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

DEADLINE = 600
pytestmark = [
    pytest.mark.timeout(2 * DEADLINE),  # the first test waits for all
    # Keras' arrays take no `copy`, for which NumPy 2 asks (Keras 3.15).
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),
]
COUNT, OWN = 2, 2
PROGRAMS = {  # `checkpoints` first: a process that fills its disk may print little
    "test_one_and_two_processes_restore_what_the_other_saved": "checkpoints",
    "test_all_is_as_in_one_process": "conformance",
    "test_processes_that_do_different_things_are_told": "mismatches",
    "test_other_checkpoints_are_told_before_anything_is_written": (
        "different_checkpoints"
    ),
    "test_each_process_reads_its_own_rows": "feeding",
    "test_the_loss_curve_is_that_of_one_process": "digits",
    "test_replicas_of_two_processes_run_eagerly": "eager",
    "test_values_are_copied_and_variables_changed_on_all_processes": "placed_copies",
    "test_variables_are_made_changed_trained_and_saved": "divided_variables",
    "test_several_processes_place_read_and_save_as_one_does": "sharded",
    "test_a_captured_value_that_differs_is_told_before_the_step_begins": "captures",
    "test_processes_may_keep_other_variables_alive": "captures.collect_in_one",
    "test_processes_that_compile_other_steps_are_told": "compiled_ahead.differ",
    "test_two_processes_train_with_keras_as_one_device_does": "keras_models",
}
# Devices of each process, and how replicas lie on them: always four replicas.
LAYOUTS = {
    "wide": (4, {"logical_axes": {"core": 2}}),
    "shared": (1, {"replicas_per_device": 2}),
}


@pytest.fixture(scope="module")
def plain():
    return js.MirroredStrategy(jax.devices()[:4])


def once(tmp_path_factory, name, run):
    """A folder, and what `run(folder)` returned in the first of xdist's processes."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder, done = common / f"programs-{name}", common / f"programs-{name}.json"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + DEADLINE
        while not done.exists():
            assert time.monotonic() < end, "another test process has not ended its job"
            time.sleep(0.1)
    else:
        said = None
        try:
            said = run(folder)
        finally:
            draft = folder / "said.json"
            draft.write_text(json.dumps(said))
            draft.rename(done)
    said = json.loads(done.read_text())
    assert said is not None, "the job failed, as another test process says"
    return folder, said


def divided_over_all():
    return js.MirroredStrategy(sharding=js.StateSharding(min_bytes=0))


def ran(folder, names, devices, layout, plain):
    """What each process printed in a program, by its name."""
    # What the programs find there.
    states = {
        "sharded/one": lambda: divided_over_all().init(
            sharded.first_state, jax.random.key(3)
        ),
        "divided_variables/one": lambda: {"w": plain.mirror(WHOLE)},
        "layouts/one": lambda: {
            "w": plain.mirror(layouts.KERNEL * 2),
            "n": plain.mirror(7),
        },
        "checkpoints/one": lambda: state_of_two_replicas()[1],
        "checkpoints/copies": lambda: {
            "x": js.MirroredStrategy(jax.devices()[:2]).per_replica([1.0, 2.0])
        },
    }
    for path, make in states.items():
        if path.partition("/")[0] in names:
            with CheckpointManager(folder / path) as manager:
                manager.save(1, state := make())
            if "data" in state:
                state["data"].close()
            if path == "sharded/one":
                np.save(folder / "sharded/w.npy", state["params"]["w"])
    script = f"from workers.together import main\nmain({names!r})\n"
    env = workers.environment(devices, **layout)
    with started_job(folder, script, COUNT, 60, env, started=False) as running:
        assert running.wait(DEADLINE) == [0, 0]
    outputs = [re.split("^=== (.*)\n", r.output, flags=re.M) for r in running.ranks]
    assert all("all is well" in output for each in outputs for output in each[2:-1:2])
    return {name: [each[each.index(name) + 1] for each in outputs] for name in names}


@pytest.fixture(scope="module")
def of_plain(request, tmp_path_factory, plain):
    """The folder, and what each process printed, of the programs of selected tests."""
    items = request.session.items
    here = [each for each in items if getattr(each, "module", 0) is request.module]
    tests = {each.originalname for each in here}
    names = [name for test, name in PROGRAMS.items() if test in tests]
    run = functools.partial(ran, names=names, devices=OWN, layout={}, plain=plain)
    return once(tmp_path_factory, "plain", run)


@pytest.fixture(scope="module")
def folder(of_plain):
    return of_plain[0]


@pytest.fixture(scope="module")
def said(of_plain):
    """What each process printed in a program, by its name."""
    return of_plain[1]


@pytest.fixture(
    scope="module",
    params=["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in LAYOUTS)],
)
def laid_out(request, tmp_path_factory, plain):
    """The folder, and what was said, of processes whose replicas lie so."""
    if request.param == "plain":
        return request.getfixturevalue("of_plain")
    names = ["checkpoints", "conformance", "feeding", "layouts", "compiled_ahead.save"]
    if request.param == "wide":
        names.append("tpu_hosts")
    devices, layout = LAYOUTS[request.param]
    run = functools.partial(
        ran, names=names, devices=devices, layout=layout, plain=plain
    )
    return once(tmp_path_factory, request.param, run)


def told(outputs, word):
    """What each has printed as JSON behind a word."""
    return [json.loads(re.search(f"^{word} (.*)$", o, re.M)[1]) for o in outputs]


@pytest.fixture(scope="module")
def wanted(plain):
    return {name: conformance.tried(name, plain) for name in conformance.CHECKS}


@pytest.mark.slow
def test_all_is_as_in_one_process(laid_out, wanted):
    paths = [laid_out[0] / f"conformance/found{k}" for k in range(COUNT)]
    found = [pickle.loads(path.read_bytes()) for path in paths]
    wrong = {name: differing(wanted[name], [f[name] for f in found]) for name in wanted}
    assert not any(wrong.values()), "\n".join(filter(None, wrong.values()))


def differing(wanted, ranks):
    """What is wrong with the results of a check, empty if nothing is."""
    failed = [text for text in (wanted, *ranks) if isinstance(text, str)]
    if failed:
        return "\n".join(failed)
    try:
        equal([entry for rank in ranks for entry in rank[0]], wanted[0])
        for rank in ranks:
            equal(rank[1], wanted[1])
    except AssertionError:
        return traceback.format_exc()
    return ""


def equal(got, wanted):
    """Raise unless two trees have equal texts, and numbers as equal as rounding."""
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            equal(one, other)
    elif wanted.dtype.kind in "fV":  # bfloat16 is a V
        np.testing.assert_allclose(
            got.astype(np.float32), wanted.astype(np.float32), rtol=1e-5, atol=1e-6
        )
    else:
        np.testing.assert_array_equal(got, wanted)


_STEP = r"`\S+ at mismatches.py:\d+` \(\S+mismatches.py:\d+\)"
_VALUE = r"`one value for all replicas` \(\S+mismatches.py:\d+: [^)]*"
WANTED = {
    "shapes": rf"process 0: {_STEP}, array 0 of its arguments: float32\[4, 2\]"
    r"\n  process 1: float32\[4, 3\]\nEach process must call `run` with",
    "functions": r"process 0: `total at .*process 1: `mean at ",
    "numbers": r"array 1 of its arguments: float 1.0\n  process 1: float 2.0",
    "arrays": r"array 1 of its arguments: float32\[1\] of bits \w+\n  process 1: ",
    "how many": rf"process 0: {_STEP} with 1 arrays\n  process 1: the same with 2",
    "mirrored": rf"process 0: {_VALUE}.*: float32\[3\]\n  process 1: float32\[4\]\n"
    "All processes must make, change and read together",
    "a step and a value": rf"process 0: {_VALUE}.*process 1: `total at ",
    "to_host": r"process 0: `to_host`.*float32\[4, 2\]\n  process 1: float32\[4\]",
    "assigning": rf"process 0: {_VALUE}.*: float32\[2\]\n  process 1: float32\[\]",
    "captured": "Processes 0 and 1 have made different programs of `scaled`, and were",
    "reading": "process 0: `the value of variable 'seen'`.*process 1: `to_host`",
}


@pytest.mark.slow
def test_processes_that_do_different_things_are_told(said):
    zero, one = told(said["mismatches"], "told")
    assert zero.keys() == one.keys() == WANTED.keys()
    for name, pattern in WANTED.items():
        assert re.search(pattern, zero[name], re.S), (name, zero[name])
        assert re.search(pattern, one[name], re.S), (name, one[name])


DIFFERENT = {
    "save and step": r"process 0: `save checkpoint 2 in `.*process 1: `train_step at",
    "save another step": r"save checkpoint 2 in .*process 1: `save checkpoint 3 in",
    "save another folder": r"saved0`` .*process 1: `save checkpoint 2 in `.*saved1``",
    "save and restore": r"process 0: `save checkpoint 2 in .*process 1: `restore in",
    "save other leaves": r"different states in save checkpoint 2 in .*: process 0 has "
    r"`t` \(a Python int\), process 1 has `v` \(float32\[2,3\]\)",
}


@pytest.mark.slow
def test_other_checkpoints_are_told_before_anything_is_written(said):
    for texts, found in told(said["different_checkpoints"], "told"):
        assert texts.keys() == DIFFERENT.keys() and found == ["saved/1"]
        for name, pattern in DIFFERENT.items():
            assert re.search(pattern, texts[name], re.S), (name, texts[name])


KINDS = {
    "large": r"float32\[5000, 4\], used at \S+captures.py:\d+: \"large\"",
    "on a device": r"\], `captured large`, used at \S+captures.py:\d+: \"on a dev",
    "a number": "The code differs, or a number in it.",
    "a key": r"key<fry>\[\], `captured key`, used at \S+captures.py:\d+: \"a key\"",
    "a large one in a jitted function": r"float32\[5000, 4\], used at \S+captures",
    "in a branch": r"float32\[5000, 4\], `captured large`, used at \S+captures.py",
    "in a function made anew": r"`captured large`, used at \S+captures.py:\d+: return",
    "as an argument": r"is given, differs:\n  float32\[5000, 4\], argument `z`, used",
}
# Of programs that there are, and were the same.
LATER = {
    "an integer argument": r"array 1 of its arguments: int 1\n  process 1: int 2",
    "later, 2": r"captures.py:\d+\), array \d of its arguments: float32\[5000, 4\] \w+,"
    r" `captured large`\n",
}


@pytest.mark.slow
def test_a_captured_value_that_differs_is_told_before_the_step_begins(said):
    different = {f"different: {kind}" for kind in (*KINDS, *LATER)}
    same = {f"same: {kind}" for kind in (*KINDS, *LATER, "later, 0", "later, 1")}
    (told_each, kept), other = told(said["captures"], "told")
    assert other == [told_each, kept]
    # While they are at it: a NaN of one process is told in both.
    replica_id, line = told_each.pop("a NaN")
    assert replica_id == 1 and "captures.py" in line and "jnp.log(x)" in line
    assert told_each.keys() == different
    assert kept.keys() == same | {"different: later, 0", "different: later, 1"}
    for kind, pattern in KINDS.items():
        text = told_each[f"different: {kind}"]
        step = "step" if kind == "in a function made anew" else "<lambda>"
        assert text.startswith(
            f"Processes 0 and 1 have made different programs of `{step}`, and were "
            "about to run them together. "
        )
        assert re.search(pattern, text), (kind, text)
        assert "Pass it as an argument, as a PerReplica if it is to differ" in text
    for kind, pattern in LATER.items():
        text = told_each[f"different: {kind}"]
        assert text.startswith("The processes are about to do different things")
        assert re.search(pattern, text), (kind, text)
    assert kept["same: large"] == [5] * 4


@pytest.mark.slow
def test_processes_may_keep_other_variables_alive(said):
    """The collector of each has its own time."""
    assert said["captures.collect_in_one"]


@pytest.mark.slow
def test_processes_that_compile_other_steps_are_told(said):
    first, second = told(said["compiled_ahead.differ"], "told")
    for case in ("code", "shapes", "steps", "a call"):
        assert first[case] == second[case], case
        assert first[case][0] == "ClusterError"
    assert "made different programs of `other`" in first["code"][1]
    assert "The code differs, or a number in it." in first["code"][1]
    text = first["shapes"][1]
    assert "`step at compiled_ahead.py:" in text
    assert ", ahead of its calls` (" in text
    assert "array 0 of its arguments: float32[3]\n  process 1: float32[4]" in text
    text = first["steps"][1]
    assert "process 0: `step at compiled_ahead.py:" in text
    assert "process 1: `differ.<locals>.broken at compiled_ahead.py:" in text
    assert "Each process must call `compile` or `load_compiled`" in text
    for kind, text in (first["one reduces"], second["one reduces"]):
        assert kind == "ClusterError"
        assert "process 0: `step at compiled_ahead.py:" in text
    # One that has an error of its own has that, and the others have its text.
    assert second["a step that raises"] == ["ValueError", "this process has no rate"]
    assert second["a file of another process"][0] == "CompiledStepError"
    assert second["no file"][0] == "FileNotFoundError"
    for case in ("a step that raises", "a file of another process", "no file"):
        kind, text = first[case]
        assert kind == "CompiledStepError"
        assert "is not ready here, because process 1 has raised " in text
        assert ": ".join(second[case]) in text
        assert "All processes compile or load a step, or none does." in text
    assert (
        "the place of this process was '0 of 2', and is '1 of 2'"
        in first["a file of another process"][1]
    )


def expected(count, own):
    """What each process, with so many replicas, is given, by a plain loop."""
    n = count * own
    each = 8 // n
    batches = [np.arange(start, min(start + 8, 22.0)) for start in (0, 8, 16)]

    def of(rank, batches):
        mine = range(rank * own, (rank + 1) * own)
        return [
            [batch[i * each : (i + 1) * each].tolist() for i in mine]
            for batch in batches
        ]

    def alone(rank):
        data = 100.0 * rank + np.arange(8.0 + 5 * rank)
        parts = [data[i : i + 2].tolist() for i in range(0, len(data), 2)]
        most = max(-(-len(range(8 + 5 * k)) // (2 * own)) for k in range(count))
        parts += [[]] * (most * own - len(parts))
        return [parts[i : i + own] for i in range(0, len(parts), own)]

    sums = [
        [sum(map(sum, sum(step, []))), sum(map(len, sum(step, [])))]
        for step in zip(*map(alone, range(count)), strict=True)
    ]
    return [
        {
            "rows": of(rank, batches),
            "sums": [[float(batch.sum()), len(batch)] for batch in batches],
            "dropped": of(rank, batches[:2]),
            "uneven": alone(rank),
            "uneven sums": sums,
            "after": [[28.0, 8]],
            "optional": [True, of(rank, batches[:1])],
        }
        for rank in range(count)
    ]


def check_rows(found_by, count, replicas):
    """All is as a plain loop has it."""
    for found, wanted in zip(found_by, expected(count, replicas), strict=True):
        for name, value in wanted.items():
            assert found[name] == value, name
        # What is left after the first batch: of two epochs, and of what is uneven.
        for name, left in {
            "resumed": 2 * 32 // 8 - 1,
            "resumed alone": len(wanted["uneven"]) - 1,
        }.items():
            whole, again = found[name]
            assert again == whole and len(whole) == left
        n = count * replicas
        assert found["spec"] == f"PerReplica(float32[{8 // n}] x {n})"
    for own, found in enumerate(found_by):  # the first batches differ in size
        seen = [row for step in found["sizes"] for rows in step for row in rows]
        assert seen == list(np.arange(8.0 * (1 + own)))
    # Each epoch has each row once, in an order that the processes agree on.
    for epoch in (slice(0, 2), slice(2, 4)):
        seen = [row for f in found_by for step in f["shuffled"][epoch] for row in step]
        assert sorted(sum(seen, [])) == list(np.arange(16.0))


def test_each_process_reads_its_own_rows(laid_out):
    check_rows(told(laid_out[1]["feeding"], "told"), COUNT, OWN)


def state_of_two_replicas():
    """A strategy of two replicas, and its state after one batch."""
    two = js.MirroredStrategy(jax.devices()[:2])
    state = checkpoints.state_of(two, 1)
    next(state["data"])
    return two, state


@functools.cache
def rest_of_the_data():
    two, state = state_of_two_replicas()
    return [checkpoints.seen(two, batch) for batch in state["data"]]


@pytest.mark.slow
def test_one_and_two_processes_restore_what_the_other_saved(laid_out):
    folder, said = laid_out
    outputs = said["checkpoints"]

    def numbers(output, name):
        return [
            float(x) for x in re.search(f"^{name}: (.*)$", output, re.M)[1].split(", ")
        ]

    for rank, output in enumerate(outputs):
        np.testing.assert_allclose(numbers(output, "one"), rest_of_the_data(), 1e-6)
        assert (
            "refused: `x` is a PerReplica of float32[] for 2 replicas in the "
            "checkpoint, and a PerReplica of float32[] for 4 replicas was wanted"
        ) in output
        for full in (0, 1):
            # Orbax's log, of another thread, may stand on the same line.
            line = re.search(f"full {full}: .*", output)[0]
            assert f"Checkpoint {2 + full} could not be written" in line
            assert "File too large" in line
            assert f"process {full}" in line or rank == full
    one = js.MirroredStrategy(jax.devices()[:2])
    saved = folder / "checkpoints/two"
    with CheckpointManager(saved, best=("score", "max")) as manager:
        back = checkpoints.state_of(one, 9)
        for step in (manager.best_step(), manager.latest_step()):
            back = manager.restore(back, step)
            checkpoints.check(back, step, saved_by=4)
        left = [checkpoints.seen(one, batch) for batch in back["data"]]
    np.testing.assert_allclose(left, numbers(outputs[0], "two"), rtol=1e-6)
    assert len(left) == 9 and len(rest_of_the_data()) == 9


@pytest.mark.slow
@pytest.mark.parametrize("laid_out", LAYOUTS, indirect=True)
def test_processes_of_other_layouts_train_and_save_as_numpy_does(laid_out):
    folder, _ = laid_out
    wanted, _ = layouts.descent(3)
    for strategy in (
        js.MirroredStrategy(jax.devices()[:1]),
        js.MirroredStrategy(logical_axes={"core": 2}),
        js.MirroredStrategy(jax.devices()[:2], replicas_per_device=2),
    ):
        like = {"w": strategy.mirror(layouts.KERNEL), "n": strategy.mirror(0)}
        with CheckpointManager(folder / "layouts/several", strategy) as manager:
            back = manager.restore(like)
        np.testing.assert_allclose(back["w"], wanted, rtol=1e-4, atol=1e-5)
        assert int(back["n"]) == 3
    files = sorted(path.name for path in folder.glob("compiled_ahead/train*"))
    assert files == ["train.0-of-2", "train.1-of-2"]


@pytest.mark.slow
@pytest.mark.parametrize("laid_out", ["wide"], indirect=True)
def test_processes_that_start_again_load_what_they_have_saved(laid_out, plain):
    assert ran(laid_out[0], ["compiled_ahead.load"], *LAYOUTS["wide"], plain)


@pytest.mark.slow
def test_several_processes_place_read_and_save_as_one_does(said, folder):
    assert said["sharded"]
    divided = divided_over_all()
    state = divided.init(sharded.first_state, jax.random.key(3))
    for strategy in (js.MirroredStrategy(jax.devices()[:2]), divided):
        with CheckpointManager(folder / "sharded/several", strategy) as manager:
            like = jax.eval_shape(sharded.first_state, jax.random.key(0))
            found = manager.restore(like)
        for ours, own in zip(*map(jax.tree.leaves, (found, state)), strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(own).tobytes()
        assert isinstance(found["params"]["w"], js.Sharded) is (strategy is divided)


@functools.cache
def by_hand(steps):
    """The loss curve of a plain NumPy loop over the same batches."""
    data = digits.digits()
    params = {k: np.asarray(v, np.float64) for k, v in digits.create().items()}
    losses = []
    for batch in js.batches(data, digits.ROWS, shuffle=3, epochs=10):
        x, y = batch["x"].astype(np.float64), batch["y"]
        hidden = np.tanh(x @ params["w1"])
        scores = hidden @ params["w2"]
        scores -= scores.max(-1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        losses.append(-logs[np.arange(len(y)), y].sum() / digits.ROWS)
        wrong = (np.exp(logs) - np.eye(10)[y]) / digits.ROWS
        back = (wrong @ params["w2"].T) * (1 - hidden**2)
        params["w2"] -= 0.5 * hidden.T @ wrong
        params["w1"] -= 0.5 * x.T @ back
        if len(losses) == steps:
            return losses


def test_the_loss_curve_is_that_of_one_process(said, plain):
    losses, right = digits.train(plain, steps=20)
    np.testing.assert_allclose(losses, by_hand(20), rtol=1e-5)
    for curve, found in told(said["digits"], "found"):
        np.testing.assert_allclose(curve, losses, rtol=1e-5)
        assert found["all"] == 1797  # also with a last batch of 5 rows
        assert abs(found["right"] - right["right"]) <= 1 and found["right"] > 1300


@pytest.mark.slow
def test_values_are_copied_and_variables_changed_on_all_processes(said):
    assert said["placed_copies"]


@pytest.mark.slow
def test_variables_are_made_changed_trained_and_saved(said, folder, plain):
    """Variables of which each device of several processes keeps a part."""
    with plain.scope():
        both = variables()
    wanted = trained(plain, both).numpy()
    with CheckpointManager(folder / "divided_variables/saved", plain) as manager:
        manager.restore({"w": both[1]})
    np.testing.assert_allclose(both[1].numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_replicas_of_two_processes_run_eagerly(said):
    own = [[1.0, 2.0], [3.0, 14.0]]
    seen_by, found_by = told(said["eager"], "seen"), told(said["eager"], "found")
    for seen, found, mine in zip(seen_by, found_by, own, strict=True):
        assert seen == [*mine, 20.0]
        assert found["taken"] == [20.0, 5.0, mine, 20.0]
        kind, text = found["drifts"]
        assert kind == "NotMirroredVariableError"
        assert "replica 3: " in text and "of another process" in text
        kind, text = found["other"]
        assert kind == "ClusterError"
        assert "all_reduce('mean') of float32[2] in `other`" in text
        assert "all_reduce('sum') of float32[2] in `other`" in text
        kind, text = found["ended"]
        assert kind == "ClusterError"
        assert "the end of the step in `ended`" in text
        assert "all_reduce('sum') of float32[] in `ended`" in text


@pytest.mark.slow
def test_two_processes_train_with_keras_as_one_device_does(said):
    with jax.numpy_rank_promotion("allow"):  # Keras adds a bias to a matrix.
        wanted = keras_models.train(None)
    for found in told(said["keras_models"], "found"):
        assert set(found) == set(wanted)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5)
    for output in said["keras_models"]:  # they would shuffle otherwise
        assert "refused: `fit` was called by processes whose" in output
