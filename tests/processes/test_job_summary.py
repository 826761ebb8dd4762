"""The launcher's page on what became of a job."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from jaxstrategy.launch._attempt import Outcome
from jaxstrategy.launch._job_summary import JobSummary
from jaxstrategy.launch._launch_options import parse
from jaxstrategy.launch._workers import Ended

DEADLINE = 60

FAILED = Outcome(
    (Ended(1, 3), Ended(0, 76)),
    (2,),
    {0: (), 1: (b"<Trace>", b"\xff ValueError: no"), 2: ()},
    None,
    (),
    100.0,
    {1: 2.0, 0: 2.5, 2: 4.0},
)
WELL = Outcome(
    (Ended(0, 0), Ended(1, 0)), (), {0: (), 1: ()}, None, (), 105.0, {0: 5.0, 1: 5.0}
)
SUMMARY = JobSummary("train", (FAILED, WELL), 0)


@pytest.fixture
def html():
    return ElementTree.fromstring(SUMMARY._repr_html_())


def texts(element, name):
    return ["".join(each.itertext()) for each in element.iter(name)]


def test_the_title_says_how_it_ended(html):
    assert texts(html, "p")[0] == "train ended well after 2 attempts, 10 s"
    again = JobSummary("train", (FAILED,), 3)._repr_html_()
    title = texts(ElementTree.fromstring(again), "p")[0]
    assert title == "train ended with exit code 3 after 1 attempt, 4 s"


def test_the_failure_is_told_with_the_last_lines(html):
    (problem,) = (d for d in html.iter("div") if "border-left" in d.get("style", ""))
    assert "".join(problem.itertext()) == (
        "Attempt 0: rank 1 failed with exit code 3.\n<Trace>\n\ufffd ValueError: no"
    )


def test_each_process_is_in_the_table(html):
    rows = [texts(row, "td") for row in html.iter("tr")][1:]
    assert [row[:4] for row in rows] == [
        ["0", "0", "0 s", "2.5 s"],
        ["0", "1", "0 s", "2 s"],
        ["0", "2", "0 s", "4 s"],
        ["1", "0", "5 s", "5 s"],
        ["1", "1", "5 s", "5 s"],
    ]
    assert rows[0][4].startswith("exit code 76 (")
    assert [row[4] for row in rows[1:]] == [
        "exit code 3",
        "killed by the launcher",
        "exit code 0",
        "exit code 0",
    ]


def test_the_timeline_has_each_process_in_each_attempt(html):
    boxes = [
        (box.get("fill"), box.get("x"), box.get("width")) for box in html.iter("rect")
    ]
    grey, red, blue = "#8a8a8a", "#d64545", "#3b82c4"
    assert boxes == [
        (grey, "0.000%", "25.000%"),
        (blue, "50.000%", "50.000%"),
        (red, "0.000%", "20.000%"),
        (blue, "50.000%", "50.000%"),
        (grey, "0.000%", "40.000%"),
    ]
    assert texts(html, "text")[-3:] == ["rank 0", "rank 1", "rank 2"]


def test_of_a_large_job_the_first_processes_are_shown():
    ranks = range(100)
    large = Outcome(
        tuple(Ended(rank, 0) for rank in ranks),
        (), {rank: () for rank in ranks}, None, (), 1.0,
        dict.fromkeys(ranks, 2.0),
    )  # fmt: skip
    html = ElementTree.fromstring(JobSummary("train", (large,), 0)._repr_html_())
    assert len(list(html.iter("rect"))) == 32
    assert "Processes over time, the first 32" in "".join(html.itertext())
    assert len(list(html.iter("tr"))) < 70


def test_a_signal_is_told():
    stopped = Outcome((Ended(0, -15),), (), {0: ()}, 15, (), 1.0, {0: 1.0})
    html = JobSummary("train", (stopped,), 143)._repr_html_()
    assert "Attempt 0 was stopped by SIGTERM." in html


def test_the_page_follows_the_browser_and_needs_nothing_else():
    page = SUMMARY.page()
    assert '<meta name="color-scheme" content="light dark">' in page
    assert "<title>train ended well after 2 attempts, 10 s</title>" in page
    assert not any(word in page for word in ("<script", "<link", "http", "<style"))


def test_the_launcher_writes_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "rank, attempt = os.environ['JAXSTRATEGY_PROCESS_ID'], "
        "os.environ['JAXSTRATEGY_ATTEMPT']\n"
        "if rank == '1' and attempt == '0':\n"
        "    sys.exit('the disk is full')\n"
    )
    options = "-n 2 --max-restarts 1 --summary summary.html script.py".split()
    ran = subprocess.run(
        [sys.executable, "-m", "jaxstrategy.launch", *options],
        cwd=tmp_path,
        timeout=DEADLINE,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "summary.html").read_text()
    assert "ended well after 2 attempts" in page
    assert "rank 1 failed with exit code 1.\nthe disk is full" in page


@pytest.mark.parametrize(
    "options, text",
    [
        ("--summary s.html --print slurm -n 2", "--summary tells of processes"),
        ("--summary s.html --workers 2", "--summary tells of processes"),
        ("--summary none/s.html", "'none/s.html'; a file in a folder that exists"),
        ("--summary .", "'.'; a file in a folder that exists"),
    ],
)
def test_mistakes(options, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    with pytest.raises(SystemExit):
        parse([*options.split(), "script.py"])
    assert text in " ".join(capsys.readouterr().err.split())
