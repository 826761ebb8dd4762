"""The demo: what it trains, what it shows, and what it refuses."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from matplotlib.image import imread

import jaxstrategy as js
from jaxstrategy._src import demo as demo


def options(**given):
    defaults = {"replicas": None, "epochs": 1, "batch_size": 96, "seed": 0}
    return demo.Arguments(**(defaults | {"out": Path("demo.png")} | given))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run of two epochs on two replicas: what it printed, drew and measured."""
    picture = tmp_path_factory.mktemp("demo") / "curves.png"
    arguments = f"--replicas 2 --epochs 2 --seed 3 --out {picture}".split()
    measured = []

    def train_both(*arguments, run=demo.train_both):
        measured[:] = run(*arguments)
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "train_both", train_both)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = demo.main(arguments)
    many, one = measured
    return SimpleNamespace(
        status=status, output=output.getvalue(), picture=picture, many=many, one=one
    )


def rows_of_table(output):
    """The table's rows, as the words between its lines."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.fixture(scope="module")
def untrained():
    return demo.initial_state(js.OneDeviceStrategy("CPU:0"), options(seed=3))


def fake_history(loss, accuracy):
    return [demo.Epoch(np.full(15, loss), accuracy, 0.1) for _ in range(2)]


@pytest.mark.slow
def test_losses_are_those_of_a_plain_loop(short_run, untrained):
    # Only the untrained network comes from the demo; the steps are written out here.
    optimizer = optax.adam(optax.cosine_decay_schedule(4e-3, 30))

    @jax.jit
    def plain_step(params, memory, images, labels):
        def loss_fn(params):
            log_p = jax.nn.log_softmax(untrained.apply_fn(params, images))
            return -log_p[np.arange(96), labels].mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory, loss

    examples, _ = demo.load()
    params, memory = untrained.params, optimizer.init(untrained.params)
    expected = []
    order = np.random.default_rng(3)
    epochs = [order.permutation(1440).reshape(15, 96) for _ in range(2)]
    for rows in np.concatenate(epochs):
        images, labels = examples.images[rows], examples.labels[rows]
        params, memory, loss = plain_step(params, memory, images, labels)
        expected.append(loss)
    for history in (short_run.many, short_run.one):
        losses = np.concatenate([epoch.losses for epoch in history])
        np.testing.assert_allclose(losses, expected, atol=1e-5)


@pytest.mark.slow
def test_a_short_run_succeeds_and_prints_a_table(short_run):
    assert short_run.status == 0
    assert "MirroredStrategy(2 replicas on cpu:0, cpu:1)" in short_run.output
    rows = rows_of_table(short_run.output)
    assert [row[0] for row in rows] == ["1", "2"]
    assert [float(row[1]) for row in rows] == pytest.approx(
        [epoch.losses.mean() for epoch in short_run.many], abs=1e-6
    )
    assert [row[3] for row in rows] == [
        f"{epoch.accuracy * 100:.1f} %" for epoch in short_run.many
    ]
    assert "Largest difference of the two loss curves: " in short_run.output
    assert "(allowed: 1e-04)" in short_run.output
    assert f"Picture of both: {short_run.picture}" in short_run.output


def test_the_picture_has_something_in_it(short_run):
    pixels = imread(short_run.picture)
    assert pixels.shape[:2] == (900, 1200)
    assert pixels.std() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "accuracy", "given", "message"),
    [
        (1.1, 0.99, {}, "Failed: the loss curves differ by 1.0e-01; at most 1e-04"),
        (np.nan, 0.99, {}, "Failed: the loss curves differ by nan"),
        (1.0, 0.9, {}, "Failed: the test accuracy is 90.0 %; at least 97.0 % was"),
        (1.0, 0.9, {"epochs": 19}, None),
    ],
)
def test_failure_is_said_and_is_the_status(
    two, tmp_path, monkeypatch, capsys, loss, accuracy, given, message
):
    histories = fake_history(loss, accuracy), fake_history(1.0, accuracy)
    monkeypatch.setattr(demo, "train_both", lambda *_: histories)
    given = {"epochs": 20, "out": tmp_path / "demo.png"} | given
    status = demo.run(two, options(**given))
    assert status == (0 if message is None else 1)
    assert (message or "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--replicas 0", "--replicas: 0 was given; a whole number from 1 to 1440"),
        ("--epochs 0", "--epochs: 0 was given; a whole number from 1 to 10000"),
        ("--epochs many", "--epochs: invalid number value: 'many'"),
        ("--batch-size 0", "--batch-size: 0 was given; a whole number from 1 to"),
        ("--batch-size 1441", "--batch-size: 1441 was given; a whole number from 1 to"),
        (
            "--replicas 5",
            "--batch-size: 5 replicas cannot share 96 images equally. "
            "Use a multiple of 5, such as 95.",
        ),
        (
            "--batch-size 4",
            "--batch-size: 8 replicas cannot share 4 images equally. "
            "Use a multiple of 8, such as 8.",
        ),
        (
            "--replicas 16",
            "--replicas: 16 were asked for, but JAX has 8 cpu device(s). "
            "Use at most 8.",
        ),
        ("--seed -1", "--seed: -1 was given; a whole number from 0 to 4294967295"),
        (
            "--out demo.jpg",
            "--out: 'demo.jpg' was given; a file name that ends in .png",
        ),
        ("--out none/demo.png", "--out: 'none/demo.png' was given; there is no folder"),
        ("--out folder.png", "--out: 'folder.png' was given; it cannot be written."),
    ],
)
def test_a_bad_option_gets_a_clear_message(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    with pytest.raises(SystemExit) as ended:
        demo.main(arguments.split())
    assert ended.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "package"), demo.EXTRAS.items())
def test_a_missing_extra_is_named(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    message = (
        f"The demo needs {package}, which is not installed. Install the extra: "
        r"pip install 'jaxstrategy\[demo\]'"
    )
    with pytest.raises(js.errors.MissingExtraError, match=message):
        demo.main([])


def python(*arguments, folder):
    """The finished process of this Python, on a plain CPU."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def test_importing_it_touches_no_device_and_no_extra(tmp_path):
    code = f"""
import sys
import jax
import {demo.__name__}
assert not set({list(demo.EXTRAS)}) & set(sys.modules)
jax.config.update("jax_num_cpu_devices", 3)  # an error once a device was touched
assert len(jax.devices("cpu")) == 3
"""
    done = python("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
