"""A loop that says how far it is."""

import gc
import io
import re
import sys

import jax
import numpy as np
import pytest
from helpers.threads import INPUT, Started

import jaxstrategy as js
from jaxstrategy import progress
from jaxstrategy.inputs import _progress
from jaxstrategy.inputs._progress import Progress, Rates
from jaxstrategy.inputs._progress_displays import Display
from jaxstrategy.masks._filled_rows import number_of_examples

rich_console = pytest.importorskip("rich.console")


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def terminal():
    return rich_console.Console(file=io.StringIO(), force_terminal=True, width=120)


def drawn(console):
    """The last state of the line, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return text.replace("\r", "\n").rstrip("\n").split("\n")[-1]


def batches(strategy, *rows):
    return strategy.experimental_distribute_dataset([np.arange(n) for n in rows])


def test_everything_comes_in_order(two, terminal):
    dataset = batches(two, 4, 4, 3)
    shown = progress(dataset, console=terminal)
    assert len(shown) == 3
    assert [b.stacked.tolist() for b in shown] == [b.stacked.tolist() for b in dataset]
    assert [b.stacked.tolist() for b in shown] == [b.stacked.tolist() for b in dataset]


def test_the_line_has_description_steps_and_rates(two, terminal):
    clock = Clock()
    shown = Progress(batches(two, 8, 8, 5), "train", None, None, terminal, clock)
    for _ in shown:
        clock.now += 0.25
    line = drawn(terminal)
    assert line.startswith("train ")
    assert "3/3" in line
    assert line.rstrip().endswith("4 steps/s, 28 examples/s")  # 21 in 0.75 s


def test_groups_count_as_many_steps_as_they_have_batches(two, terminal):
    clock = Clock()
    groups = js.grouped(batches(two, 8, 8, 8, 8, 5), 2)
    shown = Progress(groups, "", None, None, terminal, clock)
    assert len(shown) == 3
    for number, group in enumerate(shown):
        assert len(group) == (2, 2, 1)[number]
        clock.now += 0.5
    line = drawn(terminal)
    assert "5/5" in line
    assert line.rstrip().endswith("3.33 steps/s, 24.7 examples/s")  # 5 and 37 in 1.5 s


@pytest.mark.parametrize("examples", [6, lambda group: 6 * len(group)])
def test_examples_of_groups_are_as_told(terminal, examples):
    clock = Clock()
    groups = js.grouped([{"text": "a"}] * 4, 2)
    for _ in Progress(groups, "", examples, None, terminal, clock):
        clock.now += 1
    assert drawn(terminal).rstrip().endswith("2 steps/s, 12 examples/s")
    for _ in Progress(groups, "", None, None, terminal, clock):
        clock.now += 1
    assert drawn(terminal).rstrip().endswith("2 steps/s")


def test_steps_that_nobody_knows_the_number_of(terminal):
    for _ in progress((i for i in range(3)), console=terminal):
        assert "/?" in drawn(terminal)
    assert "3/3" in drawn(terminal)
    for _ in progress((i for i in range(3)), total=7, console=terminal):
        pass
    assert "3/7" in drawn(terminal)


def test_rates_are_those_of_the_last_seconds():
    clock = Clock()
    rates = Rates(clock)
    assert (rates.steps_per_second, rates.examples_per_second, str(rates)) == (
        None, None, "",
    )  # fmt: skip
    rates.add(6)
    assert rates.steps_per_second is None  # no time has passed
    clock.now += 2
    rates.add(6)
    assert (rates.steps_per_second, rates.examples_per_second) == (1, 6)
    for _ in range(200):
        clock.now += 0.5
        rates.add(100)
    assert (rates.steps_per_second, rates.examples_per_second) == (2, 200)
    assert str(rates) == "2 steps/s, 200 examples/s"
    assert rates.steps == 202
    rates.add(None)
    assert rates.examples_per_second is None
    assert str(rates).endswith(" steps/s")


def test_a_slow_step_has_a_rate():
    clock = Clock()
    rates = Rates(clock)
    for _ in range(3):
        clock.now += 60
        rates.add(30)
    assert rates.steps_per_second == 1 / 60
    assert rates.examples_per_second == 0.5


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_examples_are_the_number_of_examples(four, rows):
    _, batch = four.experimental_distribute_dataset(
        [{"x": np.zeros((n, 2))} for n in (8, rows)]
    )
    assert number_of_examples(batch) == rows


def test_examples_of_other_things(two):
    assert number_of_examples(two.per_replica([[1, 2, 3], [4, 5, 6]])) == 6
    assert number_of_examples((np.zeros((5, 2)), np.zeros(5))) == 5
    assert number_of_examples({"n": 3, "x": np.zeros(4)}) == 4
    assert number_of_examples("text") is None and number_of_examples(()) is None
    assert number_of_examples(np.float32(1)) is None


@pytest.mark.parametrize("examples", [10, lambda batch: 10])
def test_examples_may_be_given(terminal, examples):
    clock = Clock()
    shown = Progress(range(4), "", examples, None, terminal, clock)
    for _ in shown:
        clock.now += 1
    assert drawn(terminal).rstrip().endswith("1 step/s, 10 examples/s")


def test_donated_batches_are_counted_before(two, terminal):
    step = two.run(
        lambda b: b + js.batch_mask(b), options=js.RunOptions(donate_argnums=0)
    )
    for batch in progress(batches(two, 4, 4, 3), console=terminal):
        step(batch)
        assert batch.stacked.is_deleted()
    assert "3/3" in drawn(terminal)


def test_counting_does_not_wait_for_the_devices(two, terminal, monkeypatch):
    (batch,) = batches(two, 4)
    monkeypatch.setattr(jax, "block_until_ready", None)
    monkeypatch.setattr(np, "asarray", None)
    monkeypatch.setattr(jax, "device_get", None)
    assert number_of_examples(batch) == 4


# How it ends.


def test_leaving_the_loop_ends_the_thread_and_the_line(two, terminal):
    def endless():
        while True:
            yield np.ones(4)

    threads = Started(INPUT)
    dataset = two.experimental_distribute_dataset(endless)
    for _ in progress(dataset, console=terminal):
        assert threads()
        break
    assert not threads()
    with pytest.raises(KeyError, match="broken"):
        for _ in progress(dataset, console=terminal):
            raise KeyError("broken")
    gc.collect()
    assert not threads()
    # The line is not live any more.
    terminal.print("after")
    assert drawn(terminal) == "after"


def test_an_iterator_of_ones_own_is_left_open(two, terminal):
    iterator = iter(batches(two, 2, 2, 2))
    for _ in progress(iterator, console=terminal):
        break
    assert len(list(iterator)) == 2
    iterator.close()


def test_the_state_of_the_loop(two, terminal):
    dataset = two.experimental_distribute_dataset(js.batches(np.arange(6), 2))
    shown = progress(dataset, console=terminal)
    assert shown.iterator is None
    for number, _ in enumerate(shown):
        if number == 1:
            state = shown.iterator.get_state()
            break
    after = iter(dataset)
    after.set_state(state)
    assert [b.stacked.tolist() for b in progress(after)] == [[[4], [5]]]


def test_errors_of_the_source_come_through(two, terminal):
    def source():
        yield np.ones(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        for _ in progress(
            two.experimental_distribute_dataset(source), console=terminal
        ):
            pass
    assert "1/?" in drawn(terminal)


def bar_of(line):
    return [letter for letter in line if letter in "━╸╺"]


@pytest.mark.parametrize("width", [50, 60, 70, 80, 89, 90, 120])
def test_the_bar_has_room_in_narrow_terminals(width):
    console = rich_console.Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system="truecolor"
    )
    clock = Clock()
    for _ in Progress(range(100), "train", 1000, None, console, clock):
        clock.now += 0.001
    line = drawn(console)
    assert len(line) <= width and "…" not in line and "100/100" in line
    assert len(bar_of(line)) >= 15 and "1,000 steps/s" in line
    assert ("1,000,000 examples/s" in line) is (width >= 90)


@pytest.mark.parametrize("width", [50, 60, 89, 90, 120])
def test_a_long_description_is_cut_off(width):
    console = rich_console.Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system="truecolor"
    )
    clock = Clock()
    long = "the first epoch of a very long training run"
    for _ in Progress(range(100), long, 1000, None, console, clock):
        clock.now += 0.001
    line = drawn(console)
    assert len(line) <= width and line.count("…") == 1 and "100/100" in line
    assert line.lstrip().startswith("the first") and "0:00" in line.replace(
        "00:00", "0:00"
    )
    assert len(bar_of(line)) >= 5 and "1,000 steps/s" in line


def test_a_loop_of_unknown_length_ends_with_a_full_bar():
    console = rich_console.Console(file=io.StringIO(), force_terminal=True, width=60)
    for _ in progress(iter(range(60)), console=console):
        pass
    last = console.file.getvalue().rsplit("\r", 1)[-1]
    assert "60/60" in last and "?" not in last.replace("\x1b[?", "")
    colours = set(re.findall("\x1b\\[([0-9;]+)m━+", last))
    assert len(colours) == 1, "a bar that pulses has many colours"


def logged(rows, seconds, **options):
    """What is printed into a pipe by a loop whose turns take so long."""
    console = rich_console.Console(file=io.StringIO())
    clock = Clock()
    total = options.get("total")
    for _ in Progress(rows, "train", None, total, console, clock):
        clock.now += seconds
    return console.file.getvalue().splitlines()


def test_lines_are_printed_now_and_then_into_a_pipe():
    lines = logged([np.zeros(6)] * 60, 1.0)
    assert lines == [
        "train 10/60, 0:00:10, 1 step/s, 6 examples/s",
        "train 25/60, 0:00:25, 1 step/s, 6 examples/s",
        "train 48/60, 0:00:48, 1 step/s, 6 examples/s",
        "train 60/60, 0:01:00, 1 step/s, 6 examples/s",
    ]
    lines = logged(iter(range(12)), 1.0)
    assert lines == [
        "train 10/?, 0:00:10, 1 step/s",
        "train 12/12, 0:00:12, 1 step/s",
    ]
    assert len(logged(range(24 * 60), 60.0)) < 300  # a day


def test_lines_are_printed_without_rich_and_tqdm(no_rich, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    clock = Clock()
    for _ in Progress(range(3), "", None, None, None, clock):
        clock.now += 1
    assert sys.stderr.getvalue() == "3/3, 0:00:03, 1 step/s\n"


def test_tqdm_ends_with_a_full_bar_too(no_rich, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    for _ in progress(iter(range(3))):
        pass
    last = sys.stderr.getvalue().replace("\n", "").rsplit("\r", 1)[-1]
    assert "3/3" in last and "100%" in last


def test_one_inside_another(terminal):
    seen = []
    for epoch in progress(range(2), console=terminal):
        for batch in progress(range(3), console=terminal):
            seen.append((epoch, batch))
    assert seen == [(epoch, batch) for epoch in range(2) for batch in range(3)]


# Where it draws.


def test_a_short_loop_is_quiet_in_a_pipe(capfd):
    assert list(progress(range(3), description="train")) == [0, 1, 2]
    plain = rich_console.Console(file=io.StringIO())
    assert list(progress(range(3), console=plain)) == [0, 1, 2]
    assert plain.file.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_it_draws_in_notebooks(monkeypatch):
    console = rich_console.Console(file=io.StringIO(), force_jupyter=True)
    shown = []
    monkeypatch.setattr(
        _progress, "Rich", lambda *given: shown.append(given) or Quiet()
    )
    assert list(progress(range(2), description="d", console=console)) == [0, 1]
    assert shown == [("d", 2, console)]


class Quiet(Display):
    def end(self, steps):
        assert steps == 2

    def show(self, steps, rates):
        assert steps in (1, 2)

    def close(self):
        pass


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def no_rich(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


def test_tqdm_draws_where_there_is_no_rich(no_rich, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = Clock()
    for _ in Progress([np.zeros(6)] * 3, "train", None, None, None, clock):
        clock.now += 0.5
    text = sys.stderr.getvalue()
    assert "train: 100%" in text and "3/3" in text
    assert "2 steps/s, 12 examples/s" in text


def test_tqdm_is_quiet_where_nobody_looks(no_rich, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert list(progress(range(3))) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""


def test_nothing_draws_where_there_is_neither(no_rich, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress(range(3))) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""  # too short for a line


def test_only_the_first_process_draws(terminal, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert list(progress(range(3), console=terminal)) == [0, 1, 2]
    assert terminal.file.getvalue() == ""


# Mistakes.


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"iterable": 3}, "`iterable` was 3, which cannot be iterated over. Give a da"),
        (
            {"iterable": [], "total": "many"},
            "`total` was 'many'; a number of steps was",
        ),
        (
            {"iterable": [], "examples": 1.5},
            "`examples` was 1.5; a number, or a functi",
        ),
    ],
)
def test_mistakes(arguments, text):
    with pytest.raises(TypeError, match=text):
        progress(**arguments)


def test_a_length_that_is_not_known(two):
    with pytest.raises(TypeError, match="How many steps"):
        len(progress(two.experimental_distribute_dataset(iter([np.ones(2)]))))
    assert progress([])
