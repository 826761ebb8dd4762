"""What exit codes mean stands in one table, from which launcher and scripts follow."""

import ast
import re
from pathlib import Path

import pytest

import jaxstrategy
from jaxstrategy.launch import _kubernetes_manifest, _slurm_script
from jaxstrategy.launch._attempt import Outcome, is_failure
from jaxstrategy.launch._launch_options import MORE, Options
from jaxstrategy.launch._main import exit_code
from jaxstrategy.launch._workers import Ended
from jaxstrategy.processes import _exit_codes
from jaxstrategy.processes._exit_codes import ExitCode, Restart

PACKAGE = Path(jaxstrategy.__file__).parent
OPTIONS = Options(command=("train.py",), processes=2)


def ended(*codes):
    return Outcome(tuple(map(Ended, range(len(codes)), codes)), (), {}, None)


# What the guide on many processes says of each.
@pytest.mark.parametrize(
    ("name", "code", "restart", "fails"),
    [
        ("WATCHDOG", 75, Restart.COUNTED, True),
        ("PEER_DIED", 76, Restart.COUNTED, True),
        ("PREEMPTED", 77, Restart.UNCOUNTED, False),
        ("NO_RESTART", 78, Restart.NEVER, True),
    ],
)
def test_each_row(name, code, restart, fails):
    row = ExitCode[name]
    assert int(row) == code and f"{row}" == str(code)
    assert row.restart is restart and ExitCode.of(code) is row
    assert is_failure(code, None) is fails and _exit_codes.is_good(code) is not fails
    assert exit_code(ended(code)) == code


def test_the_table_is_whole():
    assert [int(row) for row in ExitCode] == [75, 76, 77, 78]


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_script_that_came_to_its_end(code):
    assert _exit_codes.is_good(code)


@pytest.mark.parametrize("code", [1, True, 2, 74, 79, 255, -9, "text", (77,)])
def test_other_codes_are_failures(code):
    assert not _exit_codes.is_good(code)
    assert not isinstance(code, int) or ExitCode.of(code) is None


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ((76, 1), Ended(1, 1)),  # the first is the other's consequence
        ((76, 75), Ended(1, 75)),
        ((1, 76), Ended(0, 1)),
        ((76, 76), Ended(0, 76)),  # of a process on another node
        ((77, 0), None),
        ((77, 78), Ended(1, 78)),
    ],
)
def test_a_consequence_is_the_cause_of_nothing(codes, cause):
    assert ended(*codes).cause == cause


@pytest.mark.parametrize("code", ExitCode)
def test_help_tells_each_row(code):
    assert re.search(rf"^  {code.value} +{re.escape(code.meaning)}$", MORE, re.M)


@pytest.mark.parametrize("code", ExitCode)
def test_printed_jobs_treat_each_row_as_the_launcher_does(code):
    script = _slurm_script.script(OPTIONS)
    manifest = _kubernetes_manifest.manifest(OPTIONS)
    rules = dict(re.findall(r"action: (\w+)  # exit code ([\d, ]+):", manifest))
    is_named = code.restart is not Restart.COUNTED
    assert (f'[ "$code" -eq {code.value} ]' in script) is is_named
    action = {Restart.UNCOUNTED: "Ignore", Restart.NEVER: "FailJob"}.get(code.restart)
    assert action is None or str(code.value) in rules[action].split(", ")
    assert (f"values: [{code.value}]" in manifest) is is_named


@pytest.mark.parametrize("folder", ["cluster", "launch", "preemption"])
def test_nothing_else_spells_a_code(folder):
    found = [
        f"{path.name}:{node.lineno}"
        for path in (PACKAGE / folder).rglob("*.py")
        if path.name != "_exit_codes.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int
        if node.value in list(ExitCode)
    ]
    assert not found
