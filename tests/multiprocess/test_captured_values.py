"""A value that a step captures, and that differs between processes, is told at once."""

import json
import re

import pytest
import workers

KINDS = {
    "large": r"float32\[5000, 4\], used at \S+captures.py:\d+: \"large\"",
    "on a device": r"\], `captured large`, used at \S+captures.py:\d+: \"on a dev",
    "a small one, once": r"float32\[4\], used at \S+captures.py:\d+: \"a small one",
    "a number": "The code differs, or a number in it.",
    "in an exported function": "The code differs, or a number in it.",
    "a key": r"key<fry>\[\], `captured key`, used at \S+captures.py:\d+: \"a key\"",
    "a large one in a jitted function": r"float32\[5000, 4\], used at \S+captures",
    "a key in a jitted function": r"key<fry>\[\], used at \S+captures.py",
    "in a branch": r"float32\[5000, 4\], `captured large`, used at \S+captures.py",
    "in a loop": r"float32\[5000, 4\], `captured large`, used at \S+captures.py",
    "in a function made anew": r"`captured large`, used at \S+captures.py:\d+: return",
    "in an object": r"`captured large.value`, used at \S+captures.py:\d+: return",
    "as an argument": r"is given, differs:\n  float32\[5000, 4\], argument `z`, used",
}
NESTED = ("in a function made anew", "in an object")
# Of programs that there are, and were the same.
LATER = {
    "an integer argument": r"array 1 of its arguments: int 1\n  process 1: int 2",
    "later, 2": r"captures.py:\d+\), array \d of its arguments: float32\[5000, 4\] \w+,"
    r" `captured large`\n",
}


@pytest.mark.slow
def test_a_captured_value_that_differs_is_told_before_the_step_begins(job):
    env = {"PYTHONPATH": workers.PATH}
    script = "from workers.captures import main\nmain()"
    different = {f"different: {kind}" for kind in (*KINDS, *LATER)}
    same = {f"same: {kind}" for kind in (*KINDS, *LATER, "later, 0", "later, 1")}
    with job(script, env=env, started=False) as running:
        assert running.wait(90) == [0, 0]
        (told, kept), other = (
            json.loads(re.search("^told (.*)$", rank.output, re.M)[1])
            for rank in running.ranks
        )
        assert other == [told, kept]
        # While they are at it: a NaN of one process is told in both.
        replica_id, line = told.pop("a NaN")
        assert replica_id == 1 and "captures.py" in line and "jnp.log(x)" in line
        assert told.keys() == different
        assert kept.keys() == same | {"different: later, 0", "different: later, 1"}
        for kind, pattern in KINDS.items():
            text = told[f"different: {kind}"]
            step = "step" if kind in NESTED else "<lambda>"
            assert text.startswith(
                f"Processes 0 and 1 have made different programs of `{step}`, and were "
                "about to run them together. "
            )
            assert re.search(pattern, text), (kind, text)
            assert "Pass it as an argument, as a PerReplica if it is to differ" in text
        for kind, pattern in LATER.items():
            text = told[f"different: {kind}"]
            assert text.startswith("The processes are about to do different things")
            assert re.search(pattern, text), (kind, text)
        assert kept["same: large"] == [5] * 4 and kept["same: in a loop"] == [3] * 4


@pytest.mark.slow
def test_processes_may_keep_other_variables_alive(job):
    # The collector of each has its own time.
    env = {"PYTHONPATH": workers.PATH}
    script = "from workers.captures import collect_in_one\ncollect_in_one()"
    with job(script, env=env, started=False) as running:
        assert running.wait(60) == [0, 0]
