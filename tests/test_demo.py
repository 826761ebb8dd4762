"""The main job: `python -m jaxstrategy.demo`."""

import re
import subprocess
import sys

import pytest

import jaxstrategy as js
from jaxstrategy import demo

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_short_run_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    out = tmp_path / "curves.png"
    status = demo.main(
        ["--epochs", "2", "--replicas", "4", "--batch-size", "240", "--out", str(out)]
    )
    printed = capsys.readouterr().out
    assert status == 0
    assert out.read_bytes().startswith(PNG) and len(out.read_bytes()) > 10_000
    assert "MirroredStrategy(4 replicas on cpu:0..3)" in printed
    rows = re.findall(r"│\s+(\d)\s│\s+([\d.]+)\s│\s+([\d.]+)\s│\s+([\d.]+) %", printed)
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(abs(float(a) - float(b)) <= 1e-4 for _, a, b, _ in rows)
    assert float(rows[1][1]) < float(rows[0][1])  # it learns
    difference = re.search(r"difference of the two loss curves: ([\d.e-]+)", printed)
    assert float(difference[1]) <= 1e-4
    assert f"Picture of both: {out}" in printed


def test_the_command_runs_in_an_empty_folder_and_learns(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxstrategy.demo", "--epochs", "6", "--replicas", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done
    assert "2 replicas on cpu:0, cpu:1" in done.stdout
    assert "\x1b" not in done.stdout  # no colours or bars in a file
    accuracy = re.search(r"Test accuracy: ([\d.]+) %", done.stdout)
    assert float(accuracy[1]) > 90
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "options, words",
    [("--replicas 0", "0 was given; a whole number from 1 to 1440"),
     ("--replicas 9", "9 were asked for, but JAX has 8 cpu device"),
     ("--replicas many", "invalid number value: 'many'"),
     ("--epochs 0", "0 was given; a whole number from 1"),
     ("--epochs 1.5", "invalid number value: '1.5'"),
     ("--batch-size 100", "8 replicas cannot share 100 images equally.*such as 96"),
     ("--batch-size 2000", "from 1 to 1440 .the number of training images"),
     ("--seed -1", "-1 was given; a whole number from 0"),
     ("--out demo.pdf", "'demo.pdf' was given; a file name that ends in .png"),
     ("--out no/such/demo.png", "there is no folder 'no/such'"),
     ("--colour blue", "unrecognized arguments: --colour blue")],
)  # fmt: skip
def test_bad_options(options, words, capsys):
    with pytest.raises(SystemExit) as info:
        demo.main(options.split())
    assert info.value.code == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    found = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util,
        "find_spec",
        lambda name: None if name == "sklearn" else found(name),
    )
    words = r"needs scikit-learn, which is not installed.*'jaxstrategy\[demo\]'"
    with pytest.raises(js.MissingExtraError, match=words):
        demo.main(["--out", str(tmp_path / "demo.png")])


def options(**changed):
    chosen = {"replicas": 8, "epochs": 20, "batch_size": 96, "seed": 0, "out": None}
    return demo.Options(**chosen | changed)


def test_what_counts_as_a_failure():
    def failures(*given):
        return [text.split(";")[0] for text in demo.failures(*given)]

    assert failures(0.99, 1e-6, options()) == []
    assert failures(0.96, 1e-6, options()) == ["the test accuracy is 96.0 %"]
    assert failures(0.50, 1e-6, options(epochs=1)) == []
    assert failures(0.99, 2e-4, options(epochs=1)) == [
        "the loss curves differ by 2.0e-04"
    ]
    assert failures(0.99, float("nan"), options()) == ["the loss curves differ by nan"]
