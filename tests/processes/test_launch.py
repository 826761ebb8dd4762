"""The launcher starts, watches and ends real processes; each with a deadline."""

import contextlib
import dataclasses
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

import jaxstrategy
from jaxstrategy.launch import _output
from jaxstrategy.launch._attempt import Outcome
from jaxstrategy.launch._launch_options import parse
from jaxstrategy.launch._main import exit_code
from jaxstrategy.launch._workers import Ended

DEADLINE = 60  # seconds; what takes longer has hung
PACKAGE = Path(jaxstrategy.__file__).parent

# The launcher needs the standard library only, so it is tried, and is fast, without
# the package around it.
LAUNCHER = f"""
import sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["jaxstrategy"] = package
from jaxstrategy.launch._main import main
assert not {{"jax", "numpy"}} & set(sys.modules)
sys.exit(main())
"""

# Every worker has these names.
PRELUDE = """
import os, signal, subprocess, sys, time
rank, count, attempt = (
    int(os.environ["JAXSTRATEGY_" + name])
    for name in ("PROCESS_ID", "NUM_PROCESSES", "ATTEMPT")
)
def write(name):  # a file that appears as a whole
    with open("new" + str(rank), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, name)
def wait():
    time.sleep(600)
"""


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    def __repr__(self):
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def lines(self):
        return sorted(self.out.splitlines())

    @property
    def last(self):
        return self.err.splitlines()[-1]


class Launched:
    """A launcher at work in a folder of its own."""

    def __init__(self, folder, command, env=None, stdout=subprocess.PIPE):
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, code=None):
        try:
            out, err = self.process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            pytest.fail(f"The launcher has hung.\n{Result(-9, out, err)}")
        result = Result(self.process.returncode, out, err)
        assert code is None or result.code == code, result
        return result

    def pids(self, *names):
        """The numbers in these files of the workers, once they are there."""
        paths = [self.folder / name for name in names]
        until(lambda: all(path.exists() for path in paths), self)
        return [int(path.read_text()) for path in paths]

    def stop(self):
        self.process.kill()
        self.process.communicate()


def until(claim, launched):
    end = time.monotonic() + DEADLINE
    while not claim():
        if time.monotonic() > end:
            launched.process.kill()
            out, err = launched.process.communicate()
            pytest.fail(f"It never came true.\n{Result(-9, out, err)}")
        time.sleep(0.01)


def is_alive(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def start(tmp_path):
    """Starts a launcher with options and the text of a script."""
    with contextlib.ExitStack() as stack:

        def start(options, script, *arguments, program=None, **keywords):
            path = tmp_path / "script.py"
            path.write_text(PRELUDE + textwrap.dedent(script))
            launcher = program or [sys.executable, "-c", LAUNCHER]
            command = [*launcher, *options.split(), str(path), *arguments]
            launched = Launched(tmp_path, command, **keywords)
            stack.callback(launched.stop)
            return launched

        yield start


@pytest.fixture
def launch(start):
    """Runs a launcher to its end."""

    def launch(options, script, *arguments, code=0, **keywords):
        return start(options, script, *arguments, **keywords).finish(code)

    return launch


# What workers are given and what is shown of them


def test_each_worker_is_told_its_place(launch):
    script = """
    import json
    names = ("COORDINATOR", "PROCESS_ID", "NUM_PROCESSES", "LOCAL_RANK", "ATTEMPT")
    place = {name: os.environ["JAXSTRATEGY_" + name] for name in names}
    kept = ("TF_CONFIG", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "OWN")
    place |= {name: os.environ.get(name) for name in kept}
    place |= {"arguments": sys.argv[1:], "input": sys.stdin.read()}
    print(json.dumps(place))
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX")}
    environment |= {"TF_CONFIG": "{}", "OWN": "1"}
    options = "-n 3 --devices-per-process 2"
    result = launch(options, script, "--x", "-n", "1", env=environment)
    assert result.err == "", result
    places = [json.loads(line.split(" ", 1)[1]) for line in result.lines]
    coordinator = places[0]["COORDINATOR"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)
    assert places == [
        {
            "COORDINATOR": coordinator,
            "PROCESS_ID": str(rank),
            "NUM_PROCESSES": "3",
            "LOCAL_RANK": str(rank),
            "ATTEMPT": "0",
            "TF_CONFIG": None,
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_PLATFORMS": "cpu",
            "OWN": "1",
            "arguments": ["--x", "-n", "1"],
            "input": "",
        }
        for rank in range(3)
    ]


def test_lines_stand_behind_their_rank_on_their_own_stream(launch):
    script = """
    print("to out", rank)
    print("and", end="")
    print("to err", rank, file=sys.stderr)
    """
    result = launch("-n 2", script)
    assert result.lines == ["[0] and", "[0] to out 0", "[1] and", "[1] to out 1"]
    assert sorted(result.err.splitlines()) == ["[0] to err 0", "[1] to err 1"]


def test_bytes_that_are_no_text_pass(start):
    launched = start("-n 1", r"sys.stdout.buffer.write(b'\xff\xfe!\n')")
    launched.process.wait(DEADLINE)
    assert launched.process.stdout.buffer.read() == b"[0] \xff\xfe!\n"


def test_gloos_chatter_is_shown_when_asked_for(launch):
    script = """
    print("[Gloo] Rank 0 is connected to 1 peer ranks.")
    print("loss 1")
    """
    assert launch("-n 1", script).out == "[0] loss 1\n"
    chatter = "[0] [Gloo] Rank 0 is connected to 1 peer ranks.\n"
    assert launch("-n 1 --verbose", script).out == chatter + "[0] loss 1\n"


def read(pieces, monkeypatch, seconds=100.0):
    """What `lines` makes of pieces that come one after the other."""
    monkeypatch.setattr(_output, "_PROGRESS_SECONDS", seconds)
    out, into = os.pipe()
    with os.fdopen(out, "rb", buffering=0) as source:

        def chunks(_, __):
            return pieces.pop(0) if pieces else b""

        monkeypatch.setattr(os, "read", chunks)
        found = list(_output.lines(lambda: os.read(source.fileno(), 100)))
    os.close(into)
    return found


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc"], [b"ab", b"c"]),
        ([b"a\r\nb\r", b"\nc\r"], [b"a", b"b", b"c"]),
        ([b"\n\n"], [b"", b""]),
        ([b"1 %\r2 %\r3 %\rdone\n"], [b"1 %", b"done"]),
        ([b"\r1 %", b"\r2 %", b"\r3 %"], [b"1 %", b"3 %"]),
        ([], []),
    ],
)
def test_lines_end_in_any_way(pieces, lines, monkeypatch):
    assert read(pieces, monkeypatch) == lines


def test_a_progress_bar_is_shown_now_and_then(monkeypatch):
    drawn = read([b"1 %\r2 %\r3 %\r\n"], monkeypatch, seconds=0.0)
    assert drawn == [b"1 %", b"2 %", b"3 %"]


def test_a_line_without_an_end_is_cut(monkeypatch):
    long = b"x" * _output._LONGEST
    assert read([long, b"y\n"], monkeypatch) == [long, b"y"]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_ranks_in_colour(start, no_color):
    ours, theirs = pty.openpty()
    environment = os.environ | {"NO_COLOR": no_color}
    launched = start("-n 2", "print(rank)", stdout=theirs, env=environment)
    launched.process.wait(DEADLINE)
    os.close(theirs)
    shown = set(os.read(ours, 1000).decode().split("\r\n")) - {""}
    os.close(ours)
    coloured = {"\x1b[31m[0]\x1b[0m 0", "\x1b[32m[1]\x1b[0m 1"}
    assert shown == ({"[0] 0", "[1] 1"} if no_color else coloured)


def test_workers_go_on_when_nobody_reads(start):
    script = """
    for i in range(20000):
        print("a line that fills the pipe", i)
    write(f"done{rank}")
    """
    launched = start("-n 2", script)
    launched.process.stdout.readline()
    launched.process.stdout.close()
    assert launched.process.wait(DEADLINE) == 0
    launched.pids("done0", "done1")


def test_modules_are_run_as_by_python(launch, tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:])")
    program = [sys.executable, "-c", LAUNCHER, "-n", "1", "-m", "mine", "--x"]
    result = launch("", "", program=program)
    assert result.out.startswith("[0] __main__ ['--x'"), result


def test_several_nodes_count_their_ranks_on(start, tmp_path):
    script = "print(rank, count, os.environ['JAXSTRATEGY_LOCAL_RANK'], flush=True)"
    options = "-n 2 --nodes 2 --coordinator a:2222 --node-rank"
    environment = {**os.environ, "JAXSTRATEGY_CLUSTER_SECRET": "the same for both"}
    nodes = [start(f"{options} {node}", script, env=environment) for node in range(2)]
    first, second = [node.finish(0) for node in nodes]
    assert first.lines == ["[0] 0 4 0", "[1] 1 4 1"]
    assert second.lines == ["[2] 2 4 0", "[3] 3 4 1"]


@pytest.mark.parametrize(
    ("visible", "shares"), [("", ["0,1", "2,3"]), ("4,6,7,9", ["4,6", "7,9"])]
)
def test_each_worker_has_gpus_of_its_own(launch, visible, shares):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    script = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    result = launch("-n 2 --gpus-per-process 2", script, env=environment)
    assert result.lines == [f"[{rank}] {share}" for rank, share in enumerate(shares)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are not held")
def test_the_port_of_a_job_is_held_for_it(launch):
    script = """
    import errno, socket
    host, port = os.environ["JAXSTRATEGY_COORDINATOR"].split(":")
    with socket.socket() as other:  # another program that is given a port by chance
        try:
            other.bind((host, int(port)))
        except OSError as error:
            print("held", error.errno == errno.EADDRINUSE)
    if rank == 0:
        with socket.create_server((host, int(port))):
            print("listens")
    """
    result = launch("-n 2", script)
    assert result.lines == ["[0] held True", "[0] listens", "[1] held True"], result


# How it ends


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and waitid")
def test_the_number_of_a_worker_that_has_ended_is_no_other_groups(launch):
    # When the job ends, what a worker left behind is killed by this number.
    script = """
    if rank == 0:
        write("first")
        sys.exit()
    while not os.path.exists("first"):
        time.sleep(0.01)
    stat = f"/proc/{open('first').read()}/stat"
    end = time.monotonic() + 20
    while time.monotonic() < end and open(stat).read().rsplit(")")[1].split()[0] != "Z":
        time.sleep(0.01)
    time.sleep(0.2)
    print(open(stat).read().rsplit(")")[1].split()[0])
    """
    assert launch("-n 2", script).lines == ["[1] Z"]


def test_a_failing_rank_is_named_after_its_last_lines(launch):
    script = """
    if rank == 1:
        print(*range(30), sep="\\n")
        raise ValueError("boom")
    wait()
    """
    result = launch("-n 3 --grace 0.1", script, code=1)
    *_, header, tail = result.err.partition("the last lines of rank 1:\n")
    assert header, result
    *tail, killed, cause = tail.splitlines()
    assert len(tail) == 20, result
    assert tail[-1] == "[1] ValueError: boom"
    assert "[1] 29" in tail and "[1] 9" not in tail
    assert killed == (
        "jaxstrategy.launch: ranks 0, 2 did not end within 0.1 s and had to be killed"
    )
    assert cause == "jaxstrategy.launch: rank 1 failed with exit code 1"


def test_a_rank_that_failed_in_silence_is_named(launch):
    result = launch("-n 1", "os._exit(9)", code=9)
    assert "rank 0 printed nothing" in result.err
    assert result.last == "jaxstrategy.launch: rank 0 failed with exit code 9"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_a_rank_that_died_of_a_signal_is_named(launch, name):
    number = signal.Signals[name]
    script = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if rank == 0:
        wait()
    os.kill(os.getpid(), signal.{name})
    """
    result = launch("-n 2 --grace 0.1", script, code=128 + number)
    assert result.last == f"jaxstrategy.launch: rank 1 failed with signal {name}"


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (75, "the watchdog ended it: no step made progress for the time allowed"),
        (76, "another process of the job died"),
        (78, "a failure that starting again would not mend"),
    ],
)
def test_our_own_exit_codes_are_explained(launch, code, meaning):
    result = launch("-n 1", f"sys.exit({code})", code=code)
    assert result.last.endswith(f"rank 0 failed with exit code {code} ({meaning})")


def test_the_death_of_a_peer_is_a_consequence(launch):
    script = """
    if rank == 1:
        write("ready")
        while not os.path.exists("gone"):
            time.sleep(0.01)
        sys.exit(5)
    while not os.path.exists("ready"):
        time.sleep(0.01)
    write("gone") if rank == 0 else None
    sys.exit(76)
    """
    result = launch("-n 3 --grace 30", script, code=5)
    then = "then ranks 0, 2 failed with exit code 76 (another process of the job died)"
    assert then in result.err.replace("2, 0", "0, 2"), result
    assert result.last == "jaxstrategy.launch: rank 1 failed with exit code 5"


def test_the_first_failure_is_the_cause():
    ended = (Ended(2, 0), Ended(3, 76), Ended(0, -6), Ended(1, 1))
    outcome = Outcome(ended, (), {}, None)
    assert outcome.cause == Ended(0, -6)
    assert outcome.consequences == {76: [3], 1: [1]}
    assert exit_code(outcome) == 134
    assert Outcome(ended[:2], (), {}, None).cause == Ended(3, 76)
    assert Outcome(ended[:1], (), {}, None).cause is None


def test_a_stopped_worker_is_killed_after_the_grace(launch):
    script = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(3)
    """
    result = launch("-n 2 --grace 0.5", script, code=3)
    assert "rank 0 did not end within 0.5 s and had to be killed" in result.err


def test_others_may_end_by_themselves_within_the_grace(launch):
    script = """
    if rank == 0:
        write("ready")
        while not os.path.exists("failed"):
            time.sleep(0.01)
        time.sleep(0.2)
        print("I saw it")
    else:
        while not os.path.exists("ready"):
            time.sleep(0.01)
        write("failed")
        sys.exit(4)
    """
    result = launch("-n 2 --grace 30", script, code=4)
    assert result.out == "[0] I saw it\n" and "killed" not in result.err


# Signals


@pytest.fixture
def signalled(start):
    """How a launcher ends that is sent a signal once both its workers are ready."""

    def signalled(options, script, number=signal.SIGTERM, *, code):
        launched = start(f"-n 2 --max-restarts 3 {options}", script)
        launched.pids("ready0", "ready1")
        launched.process.send_signal(number)
        return launched.finish(code)

    return signalled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_workers_so_that_they_can_save(signalled, number):
    script = f"""
    def save(number, _):
        time.sleep(0.1 * rank)  # longer than the grace
        print("saved", number)
        sys.exit(77)
    signal.signal({int(number)}, save)
    write(f"ready{{rank}}")
    wait()
    """
    result = signalled("--grace 0.01", script, number, code=77)
    assert result.lines == [f"[{rank}] saved {int(number)}" for rank in range(2)]
    assert result.err == f"jaxstrategy.launch: stopped by {number.name}\n"


@pytest.mark.parametrize(
    ("handler", "after"), [("SIG_DFL", ""), ("SIG_IGN", ", ranks 0, 1 killed")]
)
def test_workers_that_do_not_save_have_not_failed(signalled, handler, after):
    script = f"""
    signal.signal(signal.SIGTERM, signal.{handler})
    write(f"ready{{rank}}")
    wait()
    """
    result = signalled("--stop-grace 0.5", script, code=143)
    assert result.err == f"jaxstrategy.launch: stopped by SIGTERM{after}\n"


def test_a_failure_while_stopping_is_told(signalled):
    script = """
    def save(number, _):
        sys.exit(f"rank {rank} cannot save") if rank else wait()
    signal.signal(signal.SIGTERM, save)
    write(f"ready{rank}")
    wait()
    """
    result = signalled("--grace 0.1", script, code=1)
    assert "[1] rank 1 cannot save" in result.err
    assert result.last == "jaxstrategy.launch: rank 1 failed with exit code 1"


def test_a_second_signal_kills(start):
    script = """
    signal.signal(signal.SIGTERM, lambda *_: write(f"heard{rank}"))
    write(f"ready{rank}")
    while True:
        time.sleep(1)
    """
    launched = start("-n 2 --max-restarts 3", script)
    launched.pids("ready0", "ready1")
    launched.process.send_signal(signal.SIGTERM)
    launched.pids("heard0", "heard1")
    launched.process.send_signal(signal.SIGTERM)
    result = launched.finish(143)
    assert result.last == "jaxstrategy.launch: stopped by SIGTERM, ranks 0, 1 killed"


# Nothing is left behind

FAMILY = """
child = "import time; time.sleep(600)"
write(f"worker{rank}")
held = subprocess.Popen([sys.executable, "-c", child])
with open(f"new{rank}", "w") as file:
    file.write(str(held.pid))
os.rename(file.name, f"child{rank}")
"""
NAMES = ("worker0", "worker1", "child0", "child1")


@pytest.mark.parametrize("end", ["sys.exit(3 * rank)", "pass"])
def test_what_workers_started_ends_with_them(start, end):
    launched = start("-n 2 --grace 0.1", FAMILY + end)
    pids = launched.pids(*NAMES)
    launched.finish(0 if end == "pass" else 3)
    until(lambda: not any(map(is_alive, pids)), launched)


def test_nothing_outlives_a_launcher_that_was_killed(start):
    launched = start("-n 2", FAMILY + "wait()")
    pids = launched.pids(*NAMES)
    assert all(map(is_alive, pids))
    launched.process.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_alive, pids)), launched)
    assert launched.finish(-9).err == ""


# Restarts


def test_all_start_again_up_to_the_given_number(launch):
    script = """
    print(f"attempt {attempt} of {count}")
    if attempt < 2 and rank == 1:
        sys.exit(6)
    """
    result = launch("-n 2 --max-restarts 2 --grace 5", script)
    assert result.lines == sorted(
        f"[{rank}] attempt {attempt} of 2" for rank in range(2) for attempt in range(3)
    )
    assert "starting 2 processes again: attempt 2" in result.err
    failed = launch("-n 2 --max-restarts 1 --grace 5", script, code=6)
    assert "attempt 1" in failed.out and "attempt 2" not in failed.out


def test_each_attempt_has_a_port_of_its_own(launch):
    script = """
    print(os.environ["JAXSTRATEGY_COORDINATOR"])
    sys.exit(0 if attempt else 6)
    """
    first, second = launch("-n 1 --max-restarts 1", script).out.splitlines()
    assert first != second


def test_restarts_may_take_fewer_processes(launch):
    script = """
    print(f"attempt {attempt}: {count}") if rank == 0 else None
    sys.exit(6 if attempt < 3 else 0)
    """
    result = launch("-n 4 --max-restarts 3 --min-processes 3 --grace 5", script)
    assert result.out.splitlines() == [
        "[0] attempt 0: 4",
        "[0] attempt 1: 3",
        "[0] attempt 2: 3",
        "[0] attempt 3: 3",
    ]


def test_what_a_restart_would_not_mend_is_not_restarted(launch):
    result = launch("-n 1 --max-restarts 3", "print(attempt); sys.exit(78)", code=78)
    assert result.out == "[0] 0\n" and "attempt" not in result.err


def test_a_preempted_job_goes_on_and_it_does_not_count(launch):
    script = """
    print(f"attempt {attempt} of {count}")
    sys.exit(77 if attempt < 2 and rank == 0 else 0)
    """
    result = launch("-n 2 --min-processes 1 --max-restarts 1", script)
    assert len(result.lines) == 6 and "[1] attempt 2 of 2" in result.lines, result
    assert result.err.count("jaxstrategy.launch: preempted, the state is saved") == 2


# Arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "the script is missing: name it after the options"),
        ("-n 4", "the script is missing"),
        ("-n 0 x.py", "argument -n/--processes: '0' is not a whole number above 0"),
        ("-n two x.py", "'two' is not a whole number above 0"),
        ("--max-restarts=-1 x.py", "'-1' is not a whole number from 0 on"),
        ("--max-restarts x x.py", "'x' is not a whole number from 0 on"),
        ("--grace soon x.py", "argument --grace: 'soon' is not a time in seconds"),
        ("--grace nan x.py", "'nan' is not a time in seconds"),
        ("--proc 3 x.py", "unrecognized arguments: --proc"),
        (
            "-n 2 --max-restarts 1 --min-processes 3 x.py",
            "--min-processes 3 is more than the 2 processes of -n",
        ),
        ("-n 2 --min-processes 1 x.py", "--min-processes needs restarts"),
        (
            "-n 2 --max-restarts 1 --min-processes 1 --nodes 2 x.py",
            "--min-processes works on one machine only",
        ),
        (
            "--devices-per-process 2 --gpus-per-process 1 x.py",
            "--devices-per-process simulates devices on the CPU",
        ),
        (
            "--nodes 2 --node-rank 2 x.py",
            "--node-rank 2 is out of range: --nodes is 2, so ranks go from 0 to 1",
        ),
        ("--node-rank 1 x.py", "--node-rank 1 is out of range: --nodes is 1"),
        ("--nodes 2 --coordinator a:1 x.py", "--nodes needs --node-rank"),
        ("--nodes 2 --node-rank 0 x.py", "--nodes needs --coordinator host:port"),
        ("--coordinator a x.py", "'a' is not an address. Give it as host:port"),
        ("--coordinator a:0 x.py", "'a:0' is not an address"),
        ("missing.py", "'missing.py' is no file; give the path of a Python script"),
        (".", "'.' is a folder; give the path of a Python script"),
        ("--print pbs x.py", "argument --print: invalid choice: 'pbs'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, capsys):
    with pytest.raises(SystemExit) as end:
        parse(arguments.split())
    assert end.value.code == 2
    assert text in capsys.readouterr().err.replace("\n", " ")


def test_more_gpus_than_there_are_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SystemExit):
        parse(["-n", "3", "--gpus-per-process", "1", __file__])
    text = "3 GPUs are wanted, CUDA_VISIBLE_DEVICES has 2 (0,1)"
    assert text in capsys.readouterr().err


def test_help_tells_the_options_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m jaxstrategy.launch -n 4 train.py --epochs 3" in shown
    for part in (
        "--max-restarts",
        "--grace",
        "JAXSTRATEGY_ATTEMPT",
        "  76  ",
        "128 + s",
    ):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 88


# What clusters are given


def printed(launch, options):
    return launch(options, "", "--epochs", "a b").out


@pytest.fixture
def slurm(tmp_path):
    """Stand-ins for Slurm's commands: tasks one after the other, on one machine."""
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {
        "scontrol": '[ "$1" = show ] && echo node7 && echo node8; '
        '[ "$1" = requeue ] && echo requeued "$2"; true',
        "srun": """
            echo "srun $*" | head -n 1
            while [ "${1#--}" != "$1" ]; do shift; done
            code=0
            for rank in 0 1; do
                SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" || code=$?
            done
            exit $code""",
        "python": f'exec {sys.executable} "$@"',
    }
    for name, script in scripts.items():
        (tools / name).write_text("#!/bin/bash\n" + textwrap.dedent(script))
        (tools / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "12"}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return os.environ | variables | {"PATH": path}


def batch(launch, slurm, options, script):
    """The printed batch script, run by bash."""
    text = launch(f"{options} --print slurm", script, "--epochs", "a b").out
    done = subprocess.run(
        ["bash", "-c", text],
        env=slurm,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return text, Result(done.returncode, done.stdout, done.stderr)


def test_a_batch_script_starts_the_same_processes(launch, slurm):
    script = """
    print(os.environ["JAXSTRATEGY_COORDINATOR"], rank, count, attempt,
          os.environ["JAXSTRATEGY_LOCAL_RANK"], os.environ["JAX_NUM_CPU_DEVICES"],
          sys.argv[1:])
    """
    text, result = batch(
        launch, slurm, "-n 1 --nodes 2 --devices-per-process 4", script
    )
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text
    assert result.code == 0, result
    assert result.out.splitlines()[1:] == [
        f"node7:61452 {rank} 2 0 {rank} 4 ['--epochs', 'a b']" for rank in range(2)
    ]


def test_a_batch_script_asks_for_gpus(launch):
    text = launch("-n 4 --gpus-per-process 2 --print slurm", "").out
    assert text.count("--gpus-per-task=2") == 2 and "JAX_PLATFORMS" not in text


@pytest.mark.parametrize(("code", "attempts"), [(5, 3), (78, 1), (77, 1), (0, 1)])
def test_a_batch_script_restarts_as_the_launcher_does(launch, slurm, code, attempts):
    script = f"print('attempt', attempt); sys.exit({code})"
    _, result = batch(launch, slurm, "-n 2 --max-restarts 2", script)
    assert result.code == code, result
    assert result.out.count("attempt") == 2 * attempts, result
    assert ("requeued 12" in result.out) == (code == 77)


def test_a_manifest_starts_the_same_processes(launch):
    options = "-n 2 --nodes 3 --max-restarts 4 --gpus-per-process 1 --print k8s"
    manifest = yaml.safe_load(printed(launch, options))
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet"
    assert manifest["metadata"] == {"name": "script"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 4
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["name"] == "process" and replicated["replicas"] == 1
    assert (job["completions"], job["parallelism"]) == (6, 6)
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    assert [
        (rule["action"], rule["onExitCodes"]["values"])
        for rule in job["podFailurePolicy"]["rules"]
    ] == [("FailJob", [78]), ("Ignore", [77])]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    command = container["command"]
    assert command[0] == "python" and command[1].endswith("script.py")
    assert command[2:] == ["--epochs", "a b"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["ports"] == [{"containerPort": 2222}]


def test_a_manifest_has_the_environment_of_a_worker(launch):
    options = "-n 2 --devices-per-process 4 --coordinator a.b:80 --print k8s"
    manifest = yaml.safe_load(printed(launch, options))
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    annotation = {
        "JAXSTRATEGY_PROCESS_ID": "batch.kubernetes.io/job-completion-index",
        "JAXSTRATEGY_ATTEMPT": "jobset.sigs.k8s.io/restart-attempt",
    }
    assert {entry.pop("name"): entry for entry in container["env"]} == {
        "JAXSTRATEGY_COORDINATOR": {"value": "a.b:80"},
        "JAXSTRATEGY_NUM_PROCESSES": {"value": "2"},
        "JAXSTRATEGY_LOCAL_RANK": {"value": "0"},
        "PYTHONUNBUFFERED": {"value": "1"},
        "JAX_NUM_CPU_DEVICES": {"value": "4"},
        "JAX_PLATFORMS": {"value": "cpu"},
        "JAXSTRATEGY_CLUSTER_SECRET": {
            "valueFrom": {
                "secretKeyRef": {"name": "script-cluster-secret", "key": "secret"}
            }
        },
    } | {
        name: {
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
        }
        for name, key in annotation.items()
    }
    assert container["ports"] == [{"containerPort": 80}]
    assert "resources" not in container


def test_the_coordinator_of_a_manifest_is_its_first_pod(launch):
    options = "-n 2 --print k8s"
    manifest = yaml.safe_load(printed(launch, options))
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    first = job["template"]["spec"]["containers"][0]["env"][0]
    assert first["value"] == "script-process-0-0.script:2222"


# With JAX


def test_launched_processes_sum_over_all_devices(launch):
    script = """
    import jax, jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from jaxstrategy.cluster_resolver import LaunchedClusterResolver
    me = LaunchedClusterResolver().process()
    jax.distributed.initialize(
        me.coordinator, me.count, me.index,
        coordinator_bind_address=me.coordinator, initialization_timeout=30,
    )
    mesh = Mesh(jax.devices(), "r")
    x = jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("r")), jnp.full(2, me.index + 1.0)
    )
    total = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "r"), mesh=mesh, in_specs=P("r"), out_specs=P()
    ))(x)
    print("total", float(total), flush=True)
    """
    program = [sys.executable, "-m", "jaxstrategy.launch"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    options = "-n 2 --devices-per-process 2"
    result = launch(options, script, program=program, env=environment)
    assert result.lines == ["[0] total 6.0", "[1] total 6.0"], result
