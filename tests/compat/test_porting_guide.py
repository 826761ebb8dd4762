"""`notebooks/porting.md` is true: its programs, what the tool says, its tables."""

import re
from pathlib import Path

import jax
import pytest
from helpers.porting import main, table

GUIDE = Path(__file__).parents[2] / "notebooks" / "porting.md"
TEXT = GUIDE.read_text()
BEFORE = re.findall(
    r"```python\n# before: (\w+\.py)\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL
)
RUNNING = re.findall(
    r"```python\n# (?!before)[^\n]*\n(.*?)```\n\nprints `([^`]*)`", TEXT, re.DOTALL
)


def test_no_program_is_left_out():
    assert len(BEFORE) == 4
    assert len(BEFORE) + len(RUNNING) == TEXT.count("```python\n")


@pytest.mark.parametrize("name, program, said", BEFORE, ids=[b[0] for b in BEFORE])
def test_the_tool_says_what_the_guide_says(
    name, program, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(program)
    main([name])
    told = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(f"{name}:")
    ]
    assert [line for line in told if "note: " not in line] == said.splitlines()
    assert len(told) > len(said.splitlines())


@pytest.mark.parametrize("program, printed", RUNNING)
def test_what_was_made_of_it_runs(program, printed, capsys):
    with jax.numpy_rank_promotion("allow"):  # as Keras needs it
        exec(compile(program, "after.py", "exec"), {})
    assert capsys.readouterr().out.strip() == printed


def test_tables_are_those_of_the_tool():
    for which in ["tf2", "tf1", "2018", "others"]:
        assert f"<!-- names: {which} -->\n\n{table(which)}\n" in TEXT
