"""A run of all benchmarks keeps what was measured, and tells what got worse.

The scripts are tiny, and what they measure is written in them: nothing is timed.
"""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from helpers.benchmarks import FOLDER, load

results = load("_results")
page = load("_page")
machine = load("_machine")
run_all = load("run_all")
suite = load("_suite")
Results, Script = results.Results, suite.Script

SCRIPT = """
import argparse, os, signal, sys, time
from _timing import Comparison, add_options, report

def measure(args):
{measure}

parser = argparse.ArgumentParser()
parser.add_argument("--others-python")
add_options(parser)
args = parser.parse_args()
report(measure(args), args)
"""
FIRST = '    yield Comparison("small", "step", "us", {values}, 1.0)\n'
MAIN = """
import pathlib, sys
import _machine, run_all
from _suite import Script
scripts, others, *arguments = sys.argv[1:]
_machine.others_now = lambda: float(others)
sys.exit(run_all.main(arguments, eval(scripts), pathlib.Path.cwd()))
"""


def script(folder, name, measure=None, values=((1, 2, 3), (2, 2, 2))):
    ours, theirs = map(list, values)
    measured = FIRST.format(values={"run": ours, "by hand": theirs})
    content = SCRIPT.format(measure=measured + (measure or ""))
    (folder / f"{name}.py").write_text(content)


class Runner:
    """Runs of scripts in a folder, and the files of their page."""

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "page" / "results.json"
        self.output = folder / "output.json"
        self.scripts = [Script("first", "", 60), Script("second", "", 60)]

    def __call__(self, *arguments, others=0.0):
        files = ["--results", str(self.file), "--output", str(self.output)]
        return subprocess.run(
            [sys.executable, "-c", MAIN, repr(self.scripts), str(others)]
            + [*files, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(FOLDER)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def results(self):
        return Results.read(self.file)

    @property
    def page(self):
        return self.file.with_name("FIGURES.md").read_text()


@pytest.fixture
def runner(tmp_path):
    # The picture is drawn in another test: matplotlib takes a second to import.
    (tmp_path / "_picture.py").write_text("raise ImportError('not here')")
    for name in ("first", "second"):
        script(tmp_path, name)
    return Runner(tmp_path)


def names_of(found):
    return [(each["script"], each["case"], each["quantity"]) for each in found]


# A whole run.


def test_all_scripts_go_into_one_file_and_one_page(runner):
    done = runner()
    assert done.returncode == 0, done.stderr
    found = runner.results
    assert [each["script"] for each in found.scripts] == ["first", "second"]
    assert {each["outcome"] for each in found.scripts} == {"done"}
    assert names_of(found.comparisons) == [
        ("first", "small", "step"),
        ("second", "small", "step"),
    ]
    (run,) = found.runs
    assert run["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["versions"]["jax"] and run["cores"] >= 1 and run["commit"]
    assert runner.page == page.page(found)
    assert "| small | 2 (1.5-2.5) | 2 | 1.000 (0.75-1.25) | 1.00 | met |" in runner.page


def test_a_script_that_fails_is_told_and_what_it_measured_is_kept(runner):
    script(runner.folder, "first", '    raise ValueError("no luck")\n')
    done = runner()
    assert done.returncode == 1
    assert "no luck" in done.stderr and "first failed with exit code 1" in done.stderr
    first, second = runner.results.scripts
    assert (first["outcome"], second["outcome"]) == ("failed with exit code 1", "done")
    assert len(runner.results.of("first")) == 1
    assert "**It failed with exit code 1.**" in runner.page


def test_a_script_without_comparisons_has_failed(runner):
    (runner.folder / "first.py").write_text("")
    done = runner("--only", "first")
    assert done.returncode == 1 and "first wrote no comparisons" in done.stderr


def test_a_script_is_ended_at_its_limit_with_all_its_processes(runner):
    child = "import subprocess\n    child = subprocess.Popen(['sleep', '1000'])\n"
    told = "    print('child', child.pid, flush=True)\n    time.sleep(1000)\n"
    script(runner.folder, "first", f"    {child}{told}")
    runner.scripts = [Script("first", "", 2)]
    done = runner()
    assert done.returncode == 1
    assert "first was ended after its 2 seconds" in done.stderr
    assert len(runner.results.of("first")) == 1
    pid = int(done.stdout.split("child ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ctrl_c_keeps_what_was_measured(runner):
    to_parent = "    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(1000)\n"
    script(runner.folder, "first", to_parent)
    done = runner()
    assert done.returncode == 130, done.stderr
    assert names_of(runner.results.comparisons) == [("first", "small", "step")]
    (first,) = runner.results.scripts
    assert first["outcome"] == "was interrupted"
    assert "**It was interrupted.**" in runner.page


def test_sigterm_is_like_ctrl_c_in_the_background_too(runner):
    to_parent = "    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(1000)\n"
    script(runner.folder, "first", to_parent)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's `&` does
    try:
        done = runner()
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    # The script was ended by Ctrl-C, and could tell what it had measured.
    assert "KeyboardInterrupt" in done.stderr and "met in 1 of 1" in done.stdout
    assert len(runner.results.comparisons) == 1


def test_a_quick_run_leaves_the_page(runner):
    runner.scripts = [
        Script("first", "--unknown", 60, "--seconds 1", 60),
        Script("second", "", 60),
    ]
    script(runner.folder, "first")
    path = runner.folder / "first.py"
    path.write_text(path.read_text().replace("(parser)", "(parser, seconds=2.0)"))
    done = runner("--quick")
    assert done.returncode == 0, done.stderr
    assert "second: left out of a quick run" in done.stdout
    assert not runner.file.exists()
    (only,) = Results.read(runner.output).scripts
    assert (only["script"], only["arguments"]) == ("first", "--seconds 1")


def test_unknown_names_are_refused(runner):
    done = runner("--only", "first", "thrid")
    assert done.returncode == 1
    assert "--only thrid: the scripts are first, second." in done.stderr


# Other frameworks.


def test_without_other_frameworks_their_figures_stay_with_their_date(runner):
    other = '    values = {"run": [1.0], "tensorflow": [3.0]}\n'
    other += '    if args.others_python:\n        yield Comparison("small", '
    other += '"tensorflow", "us", values, 0.5)\n'
    script(runner.folder, "first", other)
    runner.scripts = [
        Script("first", "", 60, others=True),
        Script("second", "", 60, others=True, needs_others=True),
    ]
    assert runner("--others-python", "/opt/other/python").returncode == 0
    assert "/opt/other" not in runner.file.read_text() + runner.page
    assert "first.py --others-python PYTHON`" in runner.page
    content = runner.file.read_text()
    date = runner.results.runs[0]["date"]
    runner.file.write_text(content.replace(date, "2020-02-20 10:10 UTC"))

    done = runner()
    assert done.returncode == 0, done.stderr
    assert "second: left out; it needs `--others-python PYTHON`" in done.stdout
    assert sorted(names_of(runner.results.comparisons)) == [
        ("first", "small", "step"),
        ("first", "small", "tensorflow"),
        ("second", "small", "step"),
    ]
    assert "| met, measured 2020-02-20 |" in runner.page
    assert "`python benchmarks/second.py --others-python PYTHON`, 2020" in runner.page


# A busy machine.


def test_a_busy_machine_is_refused(runner):
    done = runner(others=0.35)
    assert done.returncode == 2
    assert "Other processes use 35% of the" in done.stderr
    assert "End them, or measure anyway with `--busy`." in done.stderr
    assert not runner.file.exists() and "===" not in done.stdout


def test_a_busy_machine_is_on_the_page(runner):
    done = runner("--busy", "--only", "first", others=0.35)
    assert done.returncode == 0, done.stderr
    assert "(at most 10% are nothing to worry about): the page says so." in done.stderr
    assert runner.results.runs[0]["others"] == 0.35
    assert "| other processes before | 35% of the cores |" in runner.page


def test_a_script_beside_which_others_ran_is_marked():
    told = {"script": "first", "run": 0, "arguments": "", "seconds": 1.0}
    about = {**machine.about(), "others": 0.0}
    for others, is_marked in ((0.05, False), (0.3, True), (None, False)):
        scripts = [{**told, "others": others, "outcome": "done"}]
        found = page.page(Results([about], scripts))
        assert ("**Other processes had 30% of the cores.**" in found) is is_marked


def test_what_others_use_is_what_is_not_used_here(monkeypatch, tmp_path):
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {core})
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    hertz = os.sysconf("SC_CLK_TCK")

    def at(seconds, own, *columns):
        """So many seconds after a start, of which some were spent here."""
        row = " ".join(str(int(each * hertz)) for each in columns)
        lines = f"cpu 9 9 9\ncpu{core} {row}\ncpu{core + 1} 7 7 7 7 7 7 7 7 7 7\n"
        machine.STAT.write_text(lines)
        times = os.times_result((own / 2, own / 4, own / 8, own / 8, 0.0))
        monkeypatch.setattr(machine.os, "times", lambda: times)
        monkeypatch.setattr(machine.time, "perf_counter", lambda: seconds)

    # User, nice, system, idle, waiting, two kinds of interrupts, stolen, guests.
    at(100, 4, 10, 1, 5, 50, 3, 1, 1, 2, 8, 8)
    watch = machine.Watch()
    at(120, 10, 14, 2, 6, 90, 4, 2, 2, 3, 9, 9)
    # 4 + 1 + 1 + 1 + 1 + 1 busy seconds, of which 6 were ours, of 20.
    assert watch.others() == pytest.approx((9 - 6) / 20)
    machine.STAT.unlink()
    assert watch.others() is None


# What got worse.


def record(median, low=None, high=None, **options):
    low, high = low or median, high or median
    told = {"script": "first", "case": "small", "quantity": "step", "note": ""}
    told |= {"programs": {"run": [1.0] * 3, "by hand": [1.0] * 3}, "least": 0.0}
    told |= {"ratio": [median, low, high], "tolerance": 0.1, "verdict": "met"}
    return {**told, **options}


OTHER = {"programs": {"run": [1.0] * 3, "as wanted": [1.0] * 3}}
STOPPED = {"ratio": None, "programs": {"run": None, "by hand": [1.0] * 3}}


@pytest.mark.parametrize(
    ("before", "now", "has_grown"),
    [
        (record(1.0), record(1.11), True),
        (record(1.0), record(1.09), False),
        (record(1.0), record(0.5), False),
        # The quartiles overlap: it may be chance.
        (record(1.0, 0.8, 1.3), record(1.4, 1.2, 1.5), False),
        (record(1.0, 0.8, 1.3), record(1.4, 1.31, 1.5), True),
        (record(0.1), record(0.12), True),
        (record(1.0), record(1.4, tolerance=0.5), False),
        (record(1.0), record(1.6, tolerance=0.5), True),
        (record(0.0), record(0.1), True),
        (record(0.0), record(0.0), False),
        (record(1.0), record(1.0, **STOPPED), True),
        (record(1.0, **STOPPED), record(9.0), False),
        (record(1.0, **STOPPED), record(1.0, **STOPPED), False),
        (record(1.0), record(9.0, **OTHER), False),
        # Between two limits only those matter.
        (record(1.0, least=0.8), record(1.24, least=0.8), False),
        (record(1.0, least=0.8), record(0.7, least=0.8, verdict="missed"), True),
    ],
)
def test_a_ratio_has_grown_or_not(before, now, has_grown):
    found = results.regressions(Results((), (), [before]), Results((), (), [now]))
    assert bool(found) is has_grown


def test_what_no_page_has_has_not_grown():
    assert results.regressions(Results(), Results((), (), [record(9.0)])) == []


def test_a_regression_is_a_failure_with_a_table(runner):
    assert runner().returncode == 0
    kept, shown = runner.file.read_text(), runner.page
    script(runner.folder, "second", values=((4, 6, 8), (2, 2, 2)))
    done = runner("--check")
    assert done.returncode == 1
    assert "Measured once more, as it seems slower: second" in done.stdout
    assert done.stdout.count("=== second") == 2 and done.stdout.count("=== first") == 1
    assert "Slower than on the page, by the ratio to its baseline: 1\n" in done.stdout
    line = "  second: small, step: 1.000 (0.75-1.25), now 3.000 (2.50-3.50)\n"
    assert line in done.stdout
    assert (runner.file.read_text(), runner.page) == (kept, shown)
    assert len(Results.read(runner.output).comparisons) == 2


def test_what_is_slow_only_once_is_no_regression(runner):
    assert runner().returncode == 0
    once = """    if not os.path.exists("again"):
        open("again", "w").close()
        yield Comparison("small", "step", "us", {"run": [9.0], "by hand": [1.0]}, 1.0)
"""
    script(runner.folder, "second", once)
    done = runner("--check")
    assert done.returncode == 0, done.stdout
    assert "Measured once more, as it seems slower: second" in done.stdout
    assert "2 comparisons: none is slower than on the page." in done.stdout


def test_results_of_a_file_are_checked_without_a_run(runner):
    assert runner().returncode == 0
    given = runner.folder / "given.json"
    content = json.loads(runner.file.read_text())
    content["comparisons"][0]["ratio"] = [2.0, 1.9, 2.1]
    content["runs"][0]["processor"] = "another one"
    del content["comparisons"][1]
    given.write_text(json.dumps(content))
    done = runner("--given", given, others=0.9)
    assert done.returncode == 1 and "===" not in done.stdout
    assert "  first: small, step: 1.000 (0.75-1.25), now 2.000" in done.stdout
    assert "The page is of another machine or other versions" in done.stdout
    assert ", now another one\n" in done.stdout
    assert "1 comparisons of the page were not made now." in done.stdout
    assert runner("--given", runner.file).returncode == 0


# One run after another.


def of_run(case, median, quantity="step"):
    return {"case": case, "quantity": quantity, "ratio": [median] * 3}


def done(name, outcome="done"):
    return {"script": name, "outcome": outcome}


def told(found):
    return [
        (each["script"], each["case"], each["quantity"], each["run"])
        for each in found.comparisons
    ]


def test_a_new_run_takes_the_place_of_the_one_before():
    both = [of_run("a", 1.0), of_run("b", 1.0), of_run("c", 1.0, "tensorflow")]
    before = Results().after({"date": "then"}, [(done("first"), both)])
    before = before.after({"date": "later"}, [(done("second"), [of_run("a", 1.0)])])
    # Without case b, and without anything of the other framework.
    new = before.after({"date": "now"}, [(done("first"), [of_run("a", 2.0)])])
    assert sorted(told(new)) == [
        ("first", "a", "step", 2),
        ("first", "c", "tensorflow", 0),
        ("second", "a", "step", 1),
    ]
    failed = before.after(
        {"date": "now"}, [(done("first", "failed"), [of_run("a", 2.0)])]
    )
    assert ("first", "b", "step", 0) in told(failed)
    assert ("first", "a", "step", 2) in told(failed)


def test_runs_of_which_nothing_is_left_are_forgotten():
    measured = [(done("first"), [of_run("a", 1.0)])]
    found = Results().after({"date": "then"}, measured).after({"date": "now"}, measured)
    assert [each["date"] for each in found.runs] == ["now"]
    assert told(found) == [("first", "a", "step", 0)]


def test_a_file_is_read_as_it_was_written(tmp_path):
    assert Results.read(tmp_path / "none.json") == Results()
    measured = [(done("first"), [of_run("a", 1.0)])]
    found = Results().after({"date": "then"}, measured)
    found.write(tmp_path / "new" / "results.json")
    assert Results.read(tmp_path / "new" / "results.json") == found


def test_numbers_become_medians_and_quartiles():
    comparison = load("_timing").Comparison
    values = {"run": [1.0, 2.0, 4.0], "by hand": []}
    found = results.condensed(comparison("a", "step", "us", values, 1.0).as_json())
    assert found["programs"] == {"run": [2.0, 1.5, 3.0], "by hand": None}
    assert found["turns"] == 3 and found["ratio"] is None
    assert "values" not in found and found["verdict"] == "met"


# The suite.


def test_a_run_takes_no_longer_than_is_said():
    assert sum(script.seconds for script in suite.SUITE) <= suite.WHOLE
    assert sum(script.quick_seconds for script in suite.SUITE) <= suite.QUICK


def test_every_benchmark_is_run_or_named_as_left_out():
    scripts = {path.stem for path in FOLDER.glob("[!_]*.py")}
    left_out = {"run_all", "faults", "overlap"}  # the last one compiles only
    assert {script.name for script in suite.SUITE} == scripts - left_out


@pytest.mark.parametrize("script", suite.SUITE, ids=lambda script: script.name)
def test_a_script_takes_the_arguments_of_the_suite(script):
    parsed = load(script.name).parsed
    for arguments in (script.arguments, script.quick or ""):
        given = parsed(shlex.split(arguments) + ["--json", "numbers.json"])
        assert given.json.name == "numbers.json"
        if script.others:
            given = parsed(["--others-python", "python"])
            assert given.others_python == "python"
