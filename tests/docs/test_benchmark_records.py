"""What a benchmark has measured is compared, printed and kept as it was measured."""

import argparse
import json

import numpy as np
import pytest
from helpers.benchmarks import load

timing = load("_timing")
Comparison = timing.Comparison
OURS = [1.0, 2.0, 3.0, 4.0, 5.0]
TWO = {"run": OURS, "by hand": [2.0] * 5}


def parsed(*arguments, **defaults):
    parser = argparse.ArgumentParser()
    timing.add_options(parser, **defaults)
    return parser.parse_args(list(map(str, arguments)))


def test_the_ratio_is_taken_turn_by_turn():
    values = {"run": OURS, "by hand": [5.0, 4.0, 3.0, 2.0, 1.0]}
    ratio = Comparison("20 x 8", "step", "us", values).ratio
    wanted = np.percentile(np.divide(*values.values()), [50, 25, 75])
    np.testing.assert_allclose([ratio.median, ratio.low, ratio.high], wanted)


@pytest.mark.parametrize(
    ("values", "options", "is_met"),
    [
        (TWO, {"target": 1.5}, True),
        (TWO, {"target": 1.49}, False),
        (TWO, {}, True),
        (TWO, {"target": 2.0, "least": 1.5}, True),
        (TWO, {"target": 2.0, "least": 1.6}, False),
        ({"run": [], "by hand": [2.0]}, {"target": 1.0}, False),
        ({"run": [9.0], "by hand": []}, {"target": 1.0}, True),
        ({"run": [], "by hand": []}, {"target": 1.0}, True),
        ({"run": [0.0], "by hand": [0.0]}, {"target": 1.0}, True),
        ({"run": [7.0]}, {}, True),
    ],
)
def test_a_target_is_met_or_missed(values, options, is_met):
    assert Comparison("case", "step", "us", values, **options).is_met is is_met


def test_what_was_stopped_has_no_ratio_and_says_so(capsys):
    found = Comparison("10,000", "trace", "cpu s", {"run": [], "by hand": [3.0]}, 1.1)
    assert found.ratio is None
    timing.print_tables([found])
    line, *_ = (x for x in capsys.readouterr().out.splitlines() if "10,000" in x)
    assert line.split() == "10,000 trace stopped 3.00 cpu s 1.10 missed".split()


def test_tables_have_medians_quartiles_targets_and_notes(capsys):
    timing.print_tables(
        [
            Comparison("20 x 8", "step", "us", TWO, 1.2, note="best: jit"),
            Comparison("30 x 8", "step", "us", {"run": [0.5], "by hand": [1.0]}, 1.2),
            Comparison("20 x 8", "state", "MB", {"run": [250.0]}),
        ]
    )
    assert (
        capsys.readouterr().out
        == """
              run                  by hand  ratio              target
20 x 8  step  3.00 us (2.00-4.00)  2.00 us  1.500 (1.00-2.00)  1.20    missed  best: jit
30 x 8  step  0.50 us              1.00 us  0.500              1.20    met

step: met in 1 of 2; worst 1.500 (1.00-2.00), at most 1.20 wanted, 20 x 8

               run     ratio  target
20 x 8  state  250 MB

"""
    )


def test_the_file_has_every_number(tmp_path, capsys):
    file = tmp_path / "numbers.json"
    found = Comparison("20 x 8", "step", "us", TWO, 1.2, note="best: jit")
    timing.report([found], parsed("--json", file))
    (kept,) = json.loads(file.read_text())["comparisons"]
    assert kept == {
        "case": "20 x 8",
        "quantity": "step",
        "unit": "us",
        "values": TWO,
        "target": 1.2,
        "in_percent": False,
        "least": 0.0,
        "note": "best: jit",
        "tolerance": 0.1,
        "spreads": {"run": [3.0, 2.0, 4.0], "by hand": [2.0, 2.0, 2.0]},
        "ratio": [1.5, 1.0, 2.0],
        "verdict": "missed",
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_end_in_the_middle_keeps_what_was_measured(tmp_path, capsys, error):
    file = tmp_path / "numbers.json"

    def measure():
        yield Comparison("first", "step", "us", TWO)
        assert len(json.loads(file.read_text())["comparisons"]) == 1, "written at once"
        yield Comparison("second", "step", "us", TWO)
        raise error

    with pytest.raises(error):
        timing.report(measure(), parsed("--json", file))
    kept = json.loads(file.read_text())["comparisons"]
    assert [each["case"] for each in kept] == ["first", "second"]
    assert "second" in capsys.readouterr().out


def test_only_with_check_is_a_missed_target_a_failure(capsys):
    found = [Comparison("case", "step", "us", TWO, 1.0)]
    timing.report(found, parsed())
    with pytest.raises(SystemExit) as ended:
        timing.report(found, parsed("--check"))
    assert ended.value.code == 1


def test_a_script_has_the_options_that_it_has_defaults_for():
    assert vars(parsed()) == {"json": None, "check": False}
    assert vars(parsed("--seconds", 2, rounds=60, seconds=12.0)) == {
        "rounds": 60,
        "seconds": 2.0,
        "json": None,
        "check": False,
    }
