"""Parts of reports: tables, charts, and colours that are seen on any page."""

import re
from xml.etree import ElementTree

import pytest

from jaxstrategy.charts._bars import BarPart, ChartBar, bars, one_part
from jaxstrategy.charts._timeline import TimelineLane, TimelineSpan, timeline
from jaxstrategy.text import _html_report
from jaxstrategy.text._html_colours import Colour


def elements(markup, name):
    """All elements of that name, of HTML that is XML too."""
    return list(ElementTree.fromstring(f"<all>{markup}</all>").iter(name))


def luminance(colour):
    """Of WCAG 2.1."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in shares
    ]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#1e1e1e", "#14181e", "#000000"])
def test_each_colour_is_seen_on_white_and_on_dark_pages(page):
    for colour in Colour:
        assert contrast(colour.value, page) >= 3, colour


def test_colours_differ():
    values = [[int(c.value[i : i + 2], 16) for i in (1, 3, 5)] for c in Colour]
    for i, one in enumerate(values):
        for other in values[:i]:
            apart = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
            assert apart > 45, (one, other)


def alignments(markup, name="td"):
    styles = [cell.get("style") for cell in elements(markup, name)]
    return [re.search("text-align:(\\w+)", style)[1] for style in styles]


@pytest.mark.parametrize(
    "numbers",
    [
        ("1", "12"),
        ("3.2 MiB", "640 B"),
        ("1.5 KiB", "12 kB"),
        ("25%", "not known"),
        ("1,200", "-3e-05"),
        ("1.5 ms", ""),
        ("12 GB/s", "1.3 k"),
    ],
)
def test_columns_of_numbers_are_aligned_to_the_right(numbers):
    rows = [("a", number) for number in numbers]
    made = _html_report.table(("what", "value"), rows)
    assert alignments(made) == ["left", "right"] * 2
    assert alignments(made, "th") == ["left", "right"]


@pytest.mark.parametrize("texts", [("cpu:1", "2"), ("", ""), ("2 replicas", "x")])
def test_other_columns_are_aligned_to_the_left(texts):
    made = _html_report.table(("what",), [(text,) for text in texts])
    assert alignments(made) == ["left"] * 2


def test_a_table_sets_code_and_escapes_the_rest():
    made = _html_report.table(("`a<b`", ""), [("`x&y` is", "<i>")], "of `z`")
    assert ["".join(x.itertext()) for x in elements(made, "td")] == ["x&y is", "<i>"]
    assert [x.text for x in elements(made, "code")] == ["z", "a<b", "x&y"]
    assert "`" not in made


def test_a_table_without_titles_has_no_row_for_them():
    assert not elements(_html_report.table(("", ""), [("a", 1)]), "th")


def test_of_many_rows_the_first_and_the_last_are_shown():
    rows = [(i,) for i in range(10)]
    cells = elements(_html_report.table(("n",), rows, most_rows=4), "td")
    assert [cell.text for cell in cells] == ["0", "1", "…", "8", "9"]
    assert len(elements(_html_report.table(("n",), rows), "td")) == 10


def test_rows_have_no_stripes_and_what_is_indented_is_moved_in():
    made = _html_report.table(("what", ""), [("memory", "4 B"), ("  code", "1 B")])
    assert all("background:none" in r.get("style") for r in elements(made, "tr"))
    first, _, second, _ = (cell.get("style") for cell in elements(made, "td"))
    assert "padding:.15em .7em;" in first and ".15em 1.7em" in second


def test_a_problem_keeps_its_lines_in_one_piece():
    (piece,) = elements(_html_report.problem("`x` was 1.\n  Do this."), "div")
    assert "".join(piece.itertext()) == "x was 1.\n  Do this."
    assert "white-space:pre-wrap" in piece.get("style")


def lengths(markup):
    return [float(r.get("width").rstrip("%")) / 100 for r in elements(markup, "rect")]


def test_bars_are_as_long_as_their_values():
    rows = [
        one_part("host", 1.0, "1 ms", Colour.HOST),
        one_part("devices", 4.0, "4 ms", Colour.COMPUTE),
    ]
    made = bars("Time", rows)
    assert lengths(made) == [0.25, 1.0]
    assert lengths(bars("Time", rows, end=8.0)) == [0.125, 0.5]
    texts = ["".join(t.itertext()) for t in elements(made, "text")]
    assert texts == ["host", "1 ms", "devices", "4 ms"]
    assert [r.get("fill") for r in elements(made, "rect")] == [
        Colour.HOST.value,
        Colour.COMPUTE.value,
    ]
    assert not elements(made, "span")  # the labels say what a legend would


def test_parts_of_a_bar_follow_each_other_and_have_a_legend():
    parts = (
        BarPart(1, "whole", Colour.WHOLE),
        BarPart(3, "parts", Colour.PART, "3 MiB"),
    )
    made = bars("Memory", [ChartBar("cpu:0", parts), ChartBar("cpu:1", parts[:1])])
    assert lengths(made) == [0.25, 0.75, 0.25]
    starts = [r.get("x") for r in elements(made, "rect")]
    assert starts == ["0.000%", "25.000%", "0.000%"]
    assert [t.text for t in elements(made, "title")] == [
        "whole: 1",
        "parts: 3 MiB",
        "whole: 1",
    ]
    told = ["".join(s.itertext()) for s in elements(made, "span")]
    assert [text for text in told if text] == ["whole", "parts"]


def test_text_in_a_chart_is_no_markup():
    bar = one_part("a < b", 1.0, "1 & more", Colour.COMPUTE)
    chart = bars("<all> & each", [bar])
    (title,) = elements(chart, "title")
    assert title.text == "1 & more"
    assert [text.text for text in elements(chart, "text")] == ["a < b", "1 & more"]
    (drawing,) = elements(chart, "svg")
    assert drawing.get("aria-label") == "<all> & each"


def test_a_spread_is_inside_of_the_chart():
    row = one_part("step", 2.0, "2 s", Colour.COMPUTE, spread=(1.0, 4.0))
    made = bars("Time", [row])
    assert lengths(made) == [0.5]
    across = elements(made, "line")[0]
    assert (across.get("x1"), across.get("x2")) == ("25.000%", "100.000%")


def test_bars_without_values_are_empty():
    nothing = one_part("idle", 0.0, "0 s", Colour.IDLE)
    assert lengths(bars("Time", [nothing])) == [0.0]
    assert lengths(bars("Time", [])) == []


def test_spans_lie_where_they_happened():
    first = TimelineSpan(10.0, 12.0, "compile", Colour.COMPILE)
    second = TimelineSpan(12.0, 18.0, "compute", Colour.COMPUTE, "100 steps")
    lanes = [TimelineLane("process 0", (first, second)), TimelineLane("1", (first,))]
    made = timeline("Run", lanes)
    assert lengths(made) == [0.25, 0.75, 0.25]
    assert [r.get("x") for r in elements(made, "rect")] == [
        "0.000%",
        "25.000%",
        "0.000%",
    ]
    texts = ["".join(t.itertext()) for t in elements(made, "text")]
    assert texts == ["0", "4 s", "8 s", "process 0", "1"]
    assert elements(made, "title")[1].text == "compute, 6 s: 100 steps"


def test_a_timeline_without_spans_has_an_axis():
    assert lengths(timeline("Run", [TimelineLane("process 0", ())])) == []


def test_reports_have_no_scripts_and_no_style_sheets():
    chart = bars("`step`", [one_part("<b>", 1.0, "1 s", Colour.HOST)])
    made = _html_report.page("`step`", [_html_report.section("Times", chart)])
    assert not re.search("<script|<style|on\\w+=|@media", made)
    assert "&lt;b&gt;" in made
    assert "var(--jaxstrategy-host,#2e9e4f)" in made
    assert "`" not in made.replace('aria-label="`step`"', "")
