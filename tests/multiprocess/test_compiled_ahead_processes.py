"""Real processes compile steps ahead, save and load them, and share what is cached."""

import json
import os
import re
import subprocess
import sys

import pytest
import workers

MAIN = "from workers.compiled_ahead import main\nmain()\n"


@pytest.fixture
def in_each(job):
    """What each process has printed as JSON behind a word, when all have ended."""

    def ran(what, word="", devices=1, more=None, **layout):
        env = workers.environment(devices, **layout) | {"WHAT": what} | (more or {})
        with job(MAIN, count=2, seconds=30, env=env, started=False) as running:
            assert running.wait(120) == [0, 0]
        outputs = [rank.output.splitlines() for rank in running.ranks]
        assert all("all is well" in lines for lines in outputs)
        return [
            json.loads(line.removeprefix(word))
            for lines in outputs
            for line in lines
            if word and line.startswith(word)
        ]

    return ran


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, layout",
    [(2, {"logical_axes": {"core": 2}}), (1, {"replicas_per_device": 2})],
    ids=str,
)
def test_processes_that_start_again_load_what_they_have_saved(
    devices, layout, in_each, tmp_path
):
    in_each("save", devices=devices, **layout)
    files = sorted(path.name for path in tmp_path.glob("train*"))
    assert files == ["train.0-of-2", "train.1-of-2"]
    in_each("load", devices=devices, **layout)


@pytest.mark.slow
def test_processes_that_differ_are_told(in_each):
    first, second = in_each("differ", "told ")
    for case in ("code", "shapes", "steps", "a call"):
        assert first[case] == second[case], case
        assert first[case][0] == "ClusterError"
    assert "made different programs of `other`" in first["code"][1]
    assert "The code differs, or a number in it." in first["code"][1]
    told = first["shapes"][1]
    assert "`step at compiled_ahead.py:" in told
    assert ", ahead of its calls` (" in told
    assert "array 0 of its arguments: float32[3]\n  process 1: float32[4]" in told
    told = first["steps"][1]
    assert "process 0: `step at compiled_ahead.py:" in told
    assert "process 1: `differ.<locals>.broken at compiled_ahead.py:" in told
    assert "Each process must call `compile` or `load_compiled`" in told
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


@pytest.mark.slow
def test_the_cache_of_a_job_has_the_programs_of_process_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MAIN)
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", "2"]
    command += ["--compilation-cache", str(tmp_path / "cache"), str(script)]

    def started():
        """Of each process: programs that were asked for, and that the cache had."""
        done = subprocess.run(
            command,
            env={**os.environ, **workers.environment(1), "WHAT": "cached"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"^\[(\d)\] cached (.*)$", done.stdout, re.MULTILINE)
        return [json.loads(counts) for _, counts in sorted(found)]

    first, other = started()
    assert first[0] > 0 == first[1]
    assert other[0] > 0 == other[1]
    (asked, found), other = started()
    assert asked == first[0] == found
    # JAX's keys differ between processes on CPUs. Where this fails, JAX has come to
    # share programs between them, and `js.experimental.compilation_cache` can say so.
    assert other[0] > other[1]
