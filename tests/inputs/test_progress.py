"""A loop that says how far it is."""

import gc
import io
import re
import sys
import time

import jax
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.threads import INPUT, Started

import jaxstrategy as js
from jaxstrategy.training import progress

rich_console = pytest.importorskip("rich.console")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when told to."""
    now = [100.0]

    def pass_by(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return pass_by


@pytest.fixture
def terminal():
    return rich_console.Console(file=io.StringIO(), force_terminal=True, width=120)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def no_rich(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


def drawn(console):
    """The last state of the line, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return text.replace("\r", "\n").rstrip("\n").split("\n")[-1].rstrip()


def batches(strategy, *rows):
    return strategy.experimental_distribute_dataset([np.arange(n) for n in rows])


def test_everything_comes_in_order_with_steps_and_rates(two, terminal, clock):
    dataset = batches(two, 8, 8, 5)
    shown = progress(dataset, description="train", console=terminal)
    assert len(shown) == 3
    for _ in range(2):
        seen = []
        for batch in shown:
            seen.append(batch.stacked.tolist())
            clock(0.25)
        assert seen == [b.stacked.tolist() for b in dataset]
        line = drawn(terminal)
        assert line.startswith("train ") and "3/3" in line
        assert line.endswith("4 steps/s, 28 examples/s")  # 21 in 0.75 s


def test_groups_count_as_many_steps_as_they_have_batches(two, terminal, clock):
    shown = progress(
        js.experimental.grouped(batches(two, 8, 8, 8, 8, 5), 2), console=terminal
    )
    assert len(shown) == 3
    for number, group in enumerate(shown):
        assert len(group) == (2, 2, 1)[number]
        clock(0.5)
    assert "5/5" in drawn(terminal)
    assert drawn(terminal).endswith("3.33 steps/s, 24.7 examples/s")  # in 1.5 s


@each_of("examples", [6, lambda group: 6 * len(group), None])
def test_examples_are_as_told(terminal, clock, examples):
    groups = js.experimental.grouped([{"text": "a"}] * 4, 2)
    for _ in progress(groups, examples=examples, console=terminal):
        clock(1)
    told = "2 steps/s" if examples is None else "2 steps/s, 12 examples/s"
    assert drawn(terminal).endswith(told)


def test_examples_are_those_of_a_batchs_first_array(two, terminal, clock):
    versions = two.per_replica([[1, 2, 3], [4, 5, 6]])
    for batch, wanted in (
        (versions, "6 examples/s"),
        ((np.zeros((5, 2)), np.zeros(5)), "5 examples/s"),
        ({"n": 3, "x": np.zeros(4)}, "4 examples/s"),
        (np.float32(1), "1 step/s"),
    ):
        for _ in progress([batch], console=terminal):
            clock(1)
        assert drawn(terminal).endswith(wanted)


def test_steps_that_nobody_knows_the_number_of(terminal):
    for _ in progress((i for i in range(3)), console=terminal):
        assert "/?" in drawn(terminal)
    assert "3/3" in drawn(terminal)
    for _ in progress((i for i in range(3)), total=7, console=terminal):
        pass
    assert "3/7" in drawn(terminal)


def test_donated_batches_are_counted_before_and_devices_not_waited_for(
    two, terminal, monkeypatch
):
    step = two.run(
        lambda b: b + js.batch_mask(b), options=js.RunOptions(donate_argnums=0)
    )
    monkeypatch.setattr(jax, "block_until_ready", None)
    monkeypatch.setattr(jax, "device_get", None)
    for batch in progress([two.per_replica([[1, 2]] * 2)], console=terminal):
        step(batch)
        assert batch.stacked.is_deleted()
    assert "1/1" in drawn(terminal)


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


def test_an_iterator_of_ones_own_is_left_open_and_keeps_its_place(two, terminal):
    iterator = iter(batches(two, 2, 2, 2))
    for _ in progress(iterator, console=terminal):
        break
    assert len(list(iterator)) == 2
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


def test_a_long_description_leaves_room(terminal):
    long = "the first epoch of a very long training run"
    for _ in progress(range(100), description=long, console=terminal):
        pass
    assert "…" in drawn(terminal) and "100/100" in drawn(terminal)
    assert drawn(terminal).startswith("the first")


def logged(clock, rows, seconds):
    """What is printed into a pipe by a loop whose turns take so long."""
    console = rich_console.Console(file=io.StringIO())
    for _ in progress(rows, description="train", console=console):
        clock(seconds)
    return console.file.getvalue().splitlines()


def test_lines_are_printed_now_and_then_into_a_pipe(clock):
    assert logged(clock, [np.zeros(6)] * 60, 1.0) == [
        "train 10/60, 0:00:10, 1 step/s, 6 examples/s",
        "train 25/60, 0:00:25, 1 step/s, 6 examples/s",
        "train 48/60, 0:00:48, 1 step/s, 6 examples/s",
        "train 60/60, 0:01:00, 1 step/s, 6 examples/s",
    ]
    assert logged(clock, iter(range(12)), 1.0) == [
        "train 10/?, 0:00:10, 1 step/s",
        "train 12/12, 0:00:12, 1 step/s",
    ]
    assert len(logged(clock, range(24 * 60), 60.0)) < 300  # a day
    assert logged(clock, range(9), 0.1) == []  # too short for a line


def test_lines_are_printed_without_rich_and_tqdm(no_rich, monkeypatch, clock):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    for _ in progress(range(3)):
        clock(1)
    assert sys.stderr.getvalue() == "3/3, 0:00:03, 1 step/s\n"


def test_tqdm_draws_where_there_is_no_rich(no_rich, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    for _ in progress(iter([np.zeros(6)] * 3), description="train"):
        pass
    last = sys.stderr.getvalue().replace("\n", "").rsplit("\r", 1)[-1]
    assert "train: 100%" in last and "3/3" in last and "examples/s" in last
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # nobody looks
    assert list(progress(range(3))) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""


def test_it_draws_in_notebooks_and_in_the_first_process_only(monkeypatch, terminal):
    drawn_by = []
    monkeypatch.setattr(
        "rich.progress.Progress.start", lambda bar: drawn_by.append(bar.console)
    )
    console = rich_console.Console(file=io.StringIO(), force_jupyter=True)
    assert list(progress(range(2), console=console)) == [0, 1]
    assert drawn_by == [console]
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert list(progress(range(3), console=terminal)) == [0, 1, 2]
    assert terminal.file.getvalue() == ""


@each_of(
    "arguments, text",
    [
        ({"iterable": 3}, "`iterable` was 3, which cannot be iterated over. Give a da"),
        ({"iterable": [], "total": "many"}, "`total` was 'many'; a number of steps wa"),
        ({"iterable": [], "examples": 1.5}, "`examples` was 1.5; a number, or a funct"),
    ],
)
def test_mistakes(arguments, text):
    with pytest.raises(TypeError, match=text):
        progress(**arguments)


def test_a_length_that_is_not_known(two):
    with pytest.raises(TypeError, match="How many steps"):
        len(progress(two.experimental_distribute_dataset(iter([np.ones(2)]))))
    assert progress([])
