"""The page of figures and its picture have the numbers of the committed results."""

import json
import re

import numpy as np
import pytest
from helpers.benchmarks import FOLDER, load
from matplotlib.colors import to_hex
from matplotlib.image import imread

page, picture = load("_page"), load("_picture")
Results = load("_results").Results
FORMS = ["run", "shard_map", "pmap", "jit", "tensorflow", "torch"]
AGAIN = "run `python benchmarks/run_all.py --draw`"


@pytest.fixture(scope="module")
def committed():
    return Results.read(FOLDER / "results.json")


def test_the_page_has_the_results(committed):
    assert (FOLDER / "FIGURES.md").read_text() == page.page(committed), AGAIN


def test_no_path_of_a_machine_is_in_the_results():
    text = (FOLDER / "results.json").read_text()
    assert re.findall(r"(?<![\w.])/(?:home|tmp|work|opt|root|usr)/", text) == []


def test_all_ratios_can_be_compared(committed):
    ratios = [each["ratio"] for each in committed.comparisons if each["ratio"]]
    assert ratios and np.isfinite(ratios).all()


def test_the_file_was_drawn_from_these_results(committed):
    content = (FOLDER / "figures.png").read_bytes()
    (found,) = re.findall(rb"tEXtDescription\x00([0-9a-f]{64})", content)
    assert found.decode() == picture.digest(committed), AGAIN
    alpha = imread(FOLDER / "figures.png")[..., 3]
    assert (alpha == 0).mean() > 0.5, "a white box on dark pages"


# The picture, of results made here.


def comparison(script, case, quantity, programs, ratio=None):
    spreads = {name: [value] * 3 for name, value in programs.items()}
    return {
        "script": script, "case": case, "quantity": quantity, "run": 0,
        "programs": spreads, "ratio": ratio,
    }  # fmt: skip


def steps():
    """Of two tasks on 2 and 8 devices; microseconds by form and place."""
    for place, task in enumerate(("20 x 8", "resnet")):
        for devices in (2, 8):
            case = f"{task}, {devices} devices"
            us = {f: 1e3 * (i + 1) * (place + devices) for i, f in enumerate(FORMS)}
            ours = {"run": us["run"], "best other": us["jit"]}
            ours |= {f: us[f] for f in FORMS[1:4]}
            ratio = [0.5 + place / 10, 0.4, 0.8 + place]
            yield comparison("train_step", case, "JAX", ours, ratio)
            for other in FORMS[4:]:
                both = {"run": us["run"], other: us[other]}
                yield comparison("train_step", case, other, both, [0.3, 0.2, 0.35])


def scaling():
    """Of 2 and 64 replicas, and of 10 and 1,000 arrays."""
    for n in (64, 2):
        case = f"{n} replicas"
        both = {"run": n / 10, "without communication": n / 20}
        yield comparison("scaling", case, "step", both, [2.0] * 3)
        for quantity, seconds in (("trace", 0.5), ("compile", 1.5)):
            yield comparison("scaling", case, quantity, {"run": seconds + n / 128})
    for n in (10, 1000):
        for quantity, scale in (("trace", 1), ("compile", 2), ("trace + compile", 3)):
            both = {"run": scale * n / 10, "shard_map": scale * n / 20}
            yield comparison("scaling", f"{n:,} arrays", quantity, both, [2.0] * 3)
    stopped = comparison("scaling", "10,000 arrays", "trace", {"shard_map": 9.0})
    stopped["programs"]["run"] = None
    yield stopped


@pytest.fixture(scope="module")
def made():
    return Results((), (), [*steps(), *scaling()])


@pytest.fixture(scope="module")
def panels(made):
    return picture.draw(made).axes


def points(axes):
    """The values of each line, by its colour."""
    return [
        (to_hex(line.get_color()), list(map(float, line.get_ydata())))
        for line in axes.lines
        if len(line.get_xdata()) > 1 and line.get_marker() not in ("_", "|")
    ]


def test_the_picture_has_the_results(panels):
    ratios, times, replicas, start, arrays = map(points, panels)
    color = picture.COLORS
    middles = [line for line in ratios if line[0] != "#7f7f7f"]
    assert middles == [
        (color["best"], [0.5, 0.5, 0.6, 0.6]),
        (color["tensorflow"], [0.3] * 4),
    ]
    # On 8 devices, of both tasks.
    assert times == [
        (color[form], [(i + 1) * 8.0, (i + 1) * 9.0]) for i, form in enumerate(FORMS)
    ]
    assert replicas == [(color["run"], [0.2, 6.4]), (color["run"], [0.1, 3.2])]
    assert start == [(color["run"], [1.515625, 2.0]), (color["run"], [0.515625, 1.0])]
    assert arrays == [
        (color["run"], [2.0, 200.0]),
        (color["run"], [1.0, 100.0]),
        (color["shard_map"], [1.0, 100.0]),
        (color["shard_map"], [0.5, 50.0]),
    ]


def test_the_picture_shows_the_spread(panels):
    best, tensorflow = (bars.lines[2][0] for bars in panels[0].containers)
    ends = [[0.4, 0.8], [0.4, 0.8], [0.4, 1.8], [0.4, 1.8]]
    for drawn, wanted in ((best, ends), (tensorflow, [[0.2, 0.35]] * 4)):
        found = [segment[:, 1].tolist() for segment in drawn.get_segments()]
        np.testing.assert_allclose(found, wanted)


def test_no_large_value_flattens_the_others(panels):
    for axes in (panels[0], panels[1], panels[2], panels[4]):
        assert axes.get_yscale() == "log"


def test_a_panel_without_results_stays_empty(made):
    without = [each for each in made.comparisons if each["script"] == "scaling"]
    axes = picture.draw(Results((), (), without)).axes
    assert [each.axison for each in axes] == [False, False, True, True, True]


def test_another_number_is_another_picture(made):
    text = json.dumps(list(made.comparisons)).replace("0.35", "0.36")
    other = Results((), (), json.loads(text))
    assert picture.digest(made) == picture.digest(made) != picture.digest(other)


# The page, of results made here.

ABOUT = {
    "date": "2026-01-02 03:04 UTC", "commit": "abc", "processor": "Chip", "cores": 4,
    "memory_gib": 16.0, "system": "Linux 6", "machine": "arm64", "python": "3.13.0",
    "versions": {"jax": "0.12"}, "load": 0.1, "others": 0.02,
}  # fmt: skip
OF_PAGE = {
    "unit": "us", "target": None, "least": 0.0, "in_percent": False, "note": "",
    "verdict": "",
}  # fmt: skip


def shown(*comparisons):
    told = {"script": "first", "run": 0, "arguments": "--seconds 1", "seconds": 61.4}
    script = {**told, "others": 0.01, "outcome": "done"}
    return page.page(Results([ABOUT], [script], comparisons))


def of_page(case, programs, ratio=None, **options):
    made = comparison("first", case, "step", programs, ratio)
    return {**made, **OF_PAGE, **options}


def test_the_page_names_machine_versions_and_script():
    found = shown(of_page("small", {"run": 0.25}))
    assert "| machine | Chip, 4 cores, 16 GiB, Linux 6 |" in found
    assert "| software | Python 3.13.0, jax 0.12 |" in found
    assert "| measured | 2026-01-02 03:04 UTC, abc |" in found
    assert "| [first](#first) | 1 | | 61 | 1% | |" in found
    assert "`python benchmarks/first.py --seconds 1`, 2026-01-02 03:04 UTC.\n" in found
    assert "Step, us:\n\n| case | run |\n| --- | --- |\n| small | 0.25 |" in found
    assert "Missed" not in found


def test_missed_targets_stand_first():
    two = {"run": 3.0, "by hand": 2.0}
    claimed = {"target": 1.0, "verdict": "missed"}
    found = shown(
        of_page("met", two, [0.9, 0.8, 1.0], target=1.0, verdict="met"),
        of_page("close", two, [1.1, 1.0, 1.2], **claimed),
        of_page("far", two, [1.5, 1.4, 1.6], **claimed),
        of_page("too little", two, [0.5, 0.5, 0.5], least=0.8, **claimed),
        of_page("share", two, [0.03, 0.03, 0.03], in_percent=True, **claimed),
    )
    (table,) = re.findall(r"## Missed targets\n\n(.*?)\n\n", found, re.DOTALL)
    assert table.splitlines()[2:] == [
        "| first | too little | step | 0.500 | 0.80 to 1.00 |",
        "| first | far | step | 1.500 (1.40-1.60) | 1.00 |",
        "| first | close | step | 1.100 (1.00-1.20) | 1.00 |",
        "| first | share | step | 3.00% | 100.00% |",
    ]
    assert "| [first](#first) | 5 | 1 of 5 |" in found


def test_what_was_stopped_and_notes_are_in_the_tables():
    made = of_page("large", {"by hand": 1.0}, target=1.0, verdict="missed", note="hm")
    made["programs"] = {"run": None, **made["programs"]}
    assert "| large | stopped | 1 | | 1.00 | missed, hm |" in shown(made)
    alone = of_page("alone", {"run": 1234.5}, note="of 8")
    assert "| case | run | |\n| --- | --- | --- |\n| alone | 1,234 | of 8 |" in shown(
        alone
    )
