"""The launcher starts, watches and ends real processes; each with a deadline."""

import contextlib
import json
import os
import pty
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers.launching import ALONE, DEADLINE, Launched, command
from helpers.processes import is_alive
from helpers.sockets import free_addresses

from jaxstrategy._src.processes.messages import Client
from jaxstrategy._src.processes.secret import Secret

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
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a launcher with options and the text of a script."""
    with contextlib.ExitStack() as stack:

        def start(options, script, *arguments, program=None, **keywords):
            path = tmp_path / "script.py"
            path.write_text(PRELUDE + textwrap.dedent(script))
            launcher = program or [sys.executable, "-c", ALONE]
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


def test_lines_stand_behind_their_rank_on_their_own_stream(start, launch):
    script = """
    print("to out", rank)
    print("[Gloo] Rank 0 is connected to 1 peer ranks.")
    print("and", end="")
    print("to err", rank, file=sys.stderr)
    """
    result = launch("-n 2", script)
    assert result.lines == ["[0] and", "[0] to out 0", "[1] and", "[1] to out 1"]
    assert sorted(result.err.splitlines()) == ["[0] to err 0", "[1] to err 1"]
    assert "[1] [Gloo] Rank 0 is connected" in launch("-n 2 --verbose", script).out
    launched = start("-n 1", r"sys.stdout.buffer.write(b'\xff\xfe!\n')")
    launched.process.wait(DEADLINE)  # bytes that are no text pass
    assert launched.process.stdout.buffer.read() == b"[0] \xff\xfe!\n"


def test_lines_end_in_any_way(launch):
    script = r"""
    def put(*pieces):
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            time.sleep(0.1)
    put(b"a\nb\n", b"c", b"d\ne\r\nf\r", b"\n\n")
    put(b"1 %\r2 %\r3 %\rdone\n")  # of a progress bar, one line a second
    put(b"x" * 70000 + b"y\n")  # too long to be kept whole
    put(b"end\r")
    """
    lines = [line.removeprefix("[0] ") for line in launch("-n 1", script).lines]
    short = [line for line in lines if len(line) < 10]
    assert sorted(short) == ["", "1 %", "a", "b", "cd", "done", "e", "end", "f"]
    long = sorted(line for line in lines if len(line) >= 10)
    assert len(long) > 1 and "".join(long) == "x" * 70000 + "y"


def test_a_terminal_shows_ranks_in_colour(start):
    for no_color in "", "1":
        ours, theirs = pty.openpty()
        environment = os.environ | {"NO_COLOR": no_color}
        launched = start("-n 2", "print(rank)", stdout=theirs, env=environment)
        launched.process.wait(DEADLINE)
        os.close(theirs)
        shown = set(os.read(ours, 1000).decode().split("\r\n")) - {""}
        os.close(ours)
        coloured = {"\x1b[31m[0]\x1b[0m 0", "\x1b[32m[1]\x1b[0m 1"}
        assert shown == ({"[0] 0", "[1] 1"} if no_color else coloured)


def test_nodes_and_workers_have_their_shares(start, launch):
    script = "print(rank, count, os.environ['JAXSTRATEGY_LOCAL_RANK'], flush=True)"
    options = "-n 2 --nodes 2 --coordinator a:2222 --node-rank"
    environment = {**os.environ, "JAXSTRATEGY_CLUSTER_SECRET": "the same for both"}
    nodes = [start(f"{options} {node}", script, env=environment) for node in range(2)]
    first, second = [node.finish(0) for node in nodes]
    assert first.lines == ["[0] 0 4 0", "[1] 1 4 1"]
    assert second.lines == ["[2] 2 4 0", "[3] 3 4 1"]
    for visible, shares in ("", ["0,1", "2,3"]), ("4,6,7,9", ["4,6", "7,9"]):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
        script = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
        result = launch("-n 2 --gpus-per-process 2", script, env=environment)
        assert result.lines == [
            f"[{rank}] {share}" for rank, share in enumerate(shares)
        ]


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
    result = launch("-n 1", "os._exit(9)", code=9)
    assert "rank 0 printed nothing" in result.err
    assert result.last == "jaxstrategy.launch: rank 0 failed with exit code 9"


def test_the_first_failure_is_the_cause_if_it_is_no_consequence(launch, tmp_path):
    for end, code, told, then in [
        ("os.abort()", 134, "signal SIGABRT", None),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "signal SIGTERM", None),
        ("sys.exit(5)", 5, "exit code 5", "1"),
        ("sys.exit(5)", 5, "exit code 5", "76"),
    ]:
        script = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        late = {then == "76"}  # whether what follows from it ends before it
        if rank == 1:
            write("ready")
            wait_for("gone") if late else None
            {end}
        wait_for("ready")
        if {then} is None:
            wait()
        if rank == 0:
            time.sleep(0 if late else 0.2)
            write("gone")
        sys.exit({then})
        """
        grace = 0.1 if then is None else 30
        result = launch(f"-n 2 --grace {grace}", script, code=code)
        assert result.last == f"jaxstrategy.launch: rank 1 failed with {told}"
        if then is not None:
            assert f"then rank 0 failed with exit code {then}" in result.err
        for name in "ready", "gone":
            (tmp_path / name).unlink(missing_ok=True)


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


FAMILY = """
child = "import time; time.sleep(600)"
write(f"worker{rank}")
held = subprocess.Popen([sys.executable, "-c", child])
with open(f"new{rank}", "w") as file:
    file.write(str(held.pid))
os.rename(file.name, f"child{rank}")
"""
NAMES = ("worker0", "worker1", "child0", "child1")


@pytest.mark.parametrize("end", ["sys.exit(3 * rank)", "pass", "wait()"])
def test_what_workers_started_ends_with_them(start, end):
    launched = start("-n 2 --grace 0.1", FAMILY + end)
    pids = launched.pids(*NAMES)
    if end == "wait()":  # until the launcher is killed
        assert all(map(is_alive, pids))
        launched.process.send_signal(signal.SIGKILL)
        launched.until(lambda: not any(map(is_alive, pids)))
        assert launched.finish(-9).err == ""
    else:
        launched.finish(0 if end == "pass" else 3)
        launched.until(lambda: not any(map(is_alive, pids)))


def test_all_start_again_up_to_the_given_number(launch):
    script = """
    print(f"attempt {attempt} of {count}")
    print(os.environ["JAXSTRATEGY_COORDINATOR"], file=sys.stderr)
    if attempt < 2 and rank == 1:
        sys.exit(6)
    """
    result = launch("-n 2 --max-restarts 2 --grace 5", script)
    assert result.lines == sorted(
        f"[{rank}] attempt {attempt} of 2" for rank in range(2) for attempt in range(3)
    )
    assert "starting 2 processes again: attempt 2" in result.err
    ports = {line.split(":")[-1] for line in result.err.splitlines() if "127.0" in line}
    assert len(ports) == 3  # each attempt has one of its own
    failed = launch("-n 2 --max-restarts 1 --grace 5", script, code=6)
    assert "attempt 1" in failed.out and "attempt 2" not in failed.out


@pytest.mark.slow
def test_a_lost_process_is_replaced_unless_that_fails_soon(launch):
    """With less patience than an attempt takes, each loss is a new one."""
    script = """
    print(f"attempt {attempt}: {count}") if rank == 0 else None
    time.sleep(0.5)
    sys.exit(6 if attempt < 3 else 0)
    """
    for seconds, counts in [(60, [3, 3, 2, 1]), (0.1, [3, 3, 3, 3])]:
        options = f"-n 1:3 --max-restarts 3 --grace 5 --wait-for-replacement {seconds}"
        result = launch(options, script)
        wanted = [f"[0] attempt {k}: {count}" for k, count in enumerate(counts)]
        assert result.out.splitlines() == wanted, result


def test_more_losses_than_restarts_end_the_job_and_say_so(launch):
    script = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else wait()"
    result = launch("-n 2 --max-restarts 1 --grace 0.1", script, code=137)
    assert "the 1 restart of --max-restarts have been made" in result.err, result
    assert result.last == "jaxstrategy.launch: rank 1 failed with signal SIGKILL"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs files in memory")
def test_what_is_in_memory_outlives_the_processes_but_not_the_job(start):
    script = """
    folder = os.environ["JAXSTRATEGY_MEMORY"]
    name = os.path.join(folder, str(rank))
    if attempt == 0:
        open(name, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.path.exists(name), oct(os.stat(folder).st_mode & 0o777))
    write(f"pid{rank}")
    print(folder, flush=True) if rank == 0 else None
    wait()
    """
    for end in signal.SIGTERM, signal.SIGKILL:
        launched = start("-n 2 --max-restarts 1 --grace 5", script)
        launched.pids("pid0", "pid1")
        lines = [launched.process.stdout.readline().strip() for _ in range(3)]
        assert [line[4:] for line in lines].count("True 0o700") == 2, lines
        (folder,) = (line[4:] for line in lines if "/dev/shm" in line)
        launched.process.send_signal(end)
        launched.process.wait(DEADLINE)
        deadline = time.monotonic() + DEADLINE
        while os.path.exists(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(folder)
        for name in "pid0", "pid1":
            (Path(launched.folder) / name).unlink()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs files in memory")
def test_what_a_killed_launcher_and_its_guard_left_is_deleted_by_the_next(
    start, tmp_path
):
    script = """
    print(os.environ["JAXSTRATEGY_MEMORY"], flush=True)
    write("pid")
    wait()
    """

    def started():
        launched = start("-n 1", script)
        (pid,) = launched.pids("pid")
        (tmp_path / "pid").unlink()
        return launched, pid, launched.process.stdout.readline().strip()[4:]

    alive, _, used = started()
    lost, pid, left = started()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if left.encode() in path.read_bytes():  # the guard
                os.kill(int(path.parent.name), signal.SIGKILL)
    lost.process.kill()
    lost.process.wait(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    assert os.path.isdir(left)
    # What others have left there under such a name is none of its business.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = Path(f"{left}link")
    link.symlink_to(elsewhere)
    try:
        last, *_, own = started()
        assert not os.path.exists(left)
        assert os.path.isdir(used) and os.path.isdir(own)
        assert link.is_symlink() and elsewhere.is_dir()
    finally:
        link.unlink()
    for launched in alive, last:
        launched.process.terminate()
        launched.finish(143)
        assert not os.path.exists(own if launched is last else used)


WHOLE = [sys.executable, "-m", "jaxstrategy.launch"]  # with ZeroMQ
# Of a machine, which is lost when the test says so, or stopped.
MEMBER = """
where = os.environ["JAXSTRATEGY_COORDINATOR"]
print(f"attempt {attempt}: {rank} of {count} at {where}", flush=True)
assert os.path.isdir(os.environ["JAXSTRATEGY_MEMORY"])  # each machine has its own
def asked(*_):
    open(f"stop{attempt}", "w").close()
signal.signal(signal.SIGTERM, asked)
write(f"pid{attempt}{rank}")
ends = {f"lost{attempt}": 76, f"stop{attempt}": 77, "over": 0}
while not (there := [name for name in ends if os.path.exists(name)]):
    time.sleep(0.01)
sys.exit(ends[there[0]])
"""


@pytest.fixture
def machine(start):
    """Starts the launcher of one of several machines."""

    def started(options, script, rank):
        env = os.environ | {"JAXSTRATEGY_CLUSTER_SECRET": "0123456789abcdef"}
        options += f" --grace 0.1 --node-rank {rank}"
        return start(options, script, program=WHOLE, env=env)

    return started


def test_a_machine_that_does_not_hear_that_it_takes_part_is_told_again(machine):
    (address,) = free_addresses(1)
    host, port = address.split(":")
    options = f"--nodes 1:2 --coordinator {address} --max-restarts 1"
    first = machine(options, MEMBER, 0)
    secret, orders = Secret("0123456789abcdef"), []
    asked = json.dumps([1, "name", -1, 0]).encode()
    end = time.monotonic() + DEADLINE
    while len(orders) < 2 and time.monotonic() < end:
        with contextlib.suppress(OSError):
            with contextlib.closing(Client(f"{host}:{int(port) + 1}", secret)) as node:
                (said,) = node.request(asked, timeout_seconds=5)
                number, order = json.loads(bytes(said))
                orders += [] if order is None else [(number, order)]
        time.sleep(0.1)
    assert orders == [(0, [0, 1])] * 2
    first.pids("pid00")
    (first.folder / "over").touch()
    first.finish(0)


def test_a_machine_that_is_lost_is_done_without_until_it_comes_back(machine):
    options = f"--nodes 1:3 --coordinator {free_addresses(1)[0]} --max-restarts 1"
    options += " --grow-every 1"
    nodes = [machine(options, MEMBER, k) for k in range(3)]
    nodes[0].pids("pid00", "pid01", "pid02")
    nodes[1].process.kill()
    (nodes[0].folder / "lost0").touch()
    nodes[0].pids("pid10", "pid11")  # of nodes 0 and 2
    nodes[1] = machine(options, MEMBER, 1)
    nodes[0].pids("pid20", "pid21", "pid22")
    (nodes[0].folder / "over").touch()
    results = [node.finish(0) for node in nodes]
    for k, wanted in enumerate(
        [
            ["0: 0 of 3", "1: 0 of 2", "2: 0 of 3"],
            ["2: 1 of 3"],
            ["0: 2 of 3", "1: 1 of 2", "2: 2 of 3"],
        ]
    ):
        ranks = [line.partition("attempt ")[2] for line in results[k].lines]
        assert sorted(rank[:9].strip() for rank in ranks) == wanted, results
    assert "attempt 1 is on 2 of 3 machines" in results[2].err
    assert "attempt 2 is on 3 of 3 machines" in results[0].err


@pytest.mark.slow
def test_the_first_machine_may_be_lost_where_others_have_an_address(machine):
    first, second, third = addresses = free_addresses(3)
    options = f"--nodes 1:3 --coordinator {','.join(addresses)} --max-restarts 3"
    options += " --grow-every 1"
    # Node 0 comes last: until then nobody is first.
    nodes = [machine(options, MEMBER, k) for k in (2, 1, 0)]
    nodes.reverse()
    nodes[0].pids("pid00", "pid01", "pid02")
    nodes[0].process.kill()
    (nodes[1].folder / "lost0").touch()
    nodes[1].pids("pid10", "pid11")
    nodes[0] = machine(options, MEMBER, 0)
    nodes[1].pids("pid20", "pid21", "pid22")
    (nodes[1].folder / "lost2").touch()
    nodes[1].pids("pid30", "pid31", "pid32")
    nodes[1].process.kill()
    nodes[2].process.kill()
    (nodes[1].folder / "lost3").touch()
    # Those that are gone may as well be those that go on.
    lost = nodes[0].finish(1)
    assert "1 of 3 machines came within 2.1 s after a loss. The others may" in lost.err
    begun = [
        f"0: 2 of 3 at {first}",
        f"1: 1 of 2 at {second}",
        f"2: 2 of 3 at {second}",
        f"3: 2 of 3 at {first}",
    ]
    again = [f"2: 1 of 3 at {second}", f"3: 0 of 3 at {first}"]
    for result, wanted in (lost, again), (nodes[2].finish(), begun):
        ranks = [line.partition("attempt ")[2] for line in result.lines]
        assert sorted(ranks) == wanted, result
    refused(
        f"--nodes 2 --node-rank 0 --coordinator {first},{second} {__file__}",
        "--coordinator has 2 addresses; it may have one",
    )


@pytest.mark.slow
def test_a_machine_that_is_cut_off_begins_no_job_of_its_own(start):
    """Where another one may lead, the others may be a job without this one."""
    impatient = """
import runpy
from jaxstrategy._src.launch import nodes
nodes._FIRST_SECONDS = 1
runpy.run_module("jaxstrategy.launch", run_name="__main__", alter_sys=True)
"""
    env = os.environ | {"JAXSTRATEGY_CLUSTER_SECRET": "0123456789abcdef"}

    def alone(most, number):
        addresses = ",".join(free_addresses(number))
        options = f"--nodes 1:{most} --coordinator {addresses} --max-restarts 1"
        program = [sys.executable, "-c", impatient]
        script = "print(count)"
        return start(f"{options} --node-rank 0", script, program=program, env=env)

    assert alone(3, 1).finish(0).lines == alone(2, 2).finish(0).lines == ["[0] 1"]
    lost = alone(3, 2).finish(1)
    assert lost.last == (
        "jaxstrategy.launch: error: 1 of 3 machines came within 1 s. The others may go "
        "on without this one: more than half must come, or half with node 0."
    )


@pytest.mark.slow
def test_who_waits_for_a_stopped_launcher_goes_on_without_it(machine):
    script = """
    write(f"pid{attempt}{rank}")
    while not os.path.exists(f"lost{attempt}"):
        time.sleep(0.01)
    sys.exit(0 if attempt else 76)
    """
    options = f"--nodes 1:3 --coordinator {','.join(free_addresses(3))}"
    options += " --max-restarts 1 --wait-for-replacement 8"
    nodes = [machine(options, script, k) for k in range(3)]
    nodes[0].pids("pid00", "pid01", "pid02")
    nodes[2].process.kill()
    (nodes[0].folder / "lost0").touch()
    time.sleep(2)  # node 0 waits for node 2, and node 1 for what node 0 will say
    nodes[0].process.send_signal(signal.SIGSTOP)
    nodes[2] = machine(options, script, 2)
    nodes[1].pids("pid10", "pid11")
    (nodes[1].folder / "lost1").touch()
    for node in nodes[1:]:
        node.finish(0)
    nodes[0].process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])  # of those that may be first
def test_a_launcher_with_another_secret_or_rank_takes_no_part(start, number):
    script = "wait_for('over')"
    addresses = ",".join(free_addresses(number))
    options = f"--nodes 2:3 --coordinator {addresses} --max-restarts 1"
    envs = [os.environ | {"JAXSTRATEGY_CLUSTER_SECRET": 16 * each} for each in "ab"]

    def node(rank, env):
        options_of = f"{options} --node-rank {rank}"
        return start(options_of, script, program=WHOLE, env=env)

    first, second = node(0, envs[0]), node(1, envs[0])
    refused = node(2, envs[1]).finish(1)
    assert re.search(r"The launcher of node \d refuses this one", refused.err)
    again = node(1, envs[0])
    ended = [second.process, again.process]
    deadline = time.monotonic() + DEADLINE
    while all(each.poll() is None for each in ended) and time.monotonic() < deadline:
        time.sleep(0.05)
    (lost,) = [each for each in (second, again) if each.process.poll() is not None]
    texts = [
        "another launcher came with --node-rank 1",
        "The launcher cannot listen at",
    ]
    assert texts[number - 1] in lost.finish(1).err
    third = node(2, envs[0])
    (first.folder / "over").touch()
    assert first.finish(0) and third.finish(0)


def test_our_own_exit_codes_are_explained_and_followed(launch):
    for code, attempts, meaning in [
        (75, 2, "the watchdog ended it: no step made progress for the time allowed"),
        (76, 2, "another process of the job died"),
        (78, 1, "a failure that starting again would not mend"),
    ]:
        script = f"print(attempt); sys.exit({code})"
        result = launch("-n 1 --max-restarts 1", script, code=code)
        assert result.last.endswith(f"rank 0 failed with exit code {code} ({meaning})")
        assert result.lines == [f"[0] {attempt}" for attempt in range(attempts)]
    script = """
    print(f"attempt {attempt} of {count}")
    sys.exit(77 if attempt < 2 and rank == 0 else 0)
    """
    result = launch("-n 2 --min-processes 1 --max-restarts 1", script)
    assert len(result.lines) == 6 and "[1] attempt 2 of 2" in result.lines, result
    assert result.err.count("jaxstrategy.launch: preempted, the state is saved") == 2


def refused(options, text):
    result = command(*options.split())
    assert result.code == 2 and result.out == "", (options, result)
    assert text in " ".join(result.err.split()), (options, result)


def test_wrong_arguments_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").touch()
    for options, text in [
        ("", "the script is missing: name it after the options"),
        ("-n 4", "the script is missing"),
        ("-n 0 x.py", "argument -n/--processes: '0' is not a whole number above 0"),
        ("-n two x.py", "'two' is not a whole number above 0"),
        ("--max-restarts=-1 x.py", "'-1' is not a whole number from 0 on"),
        ("--grace soon x.py", "argument --grace: 'soon' is not a time in seconds"),
        ("--grace nan x.py", "'nan' is not a time in seconds"),
        ("--proc 3 x.py", "unrecognized arguments: --proc"),
        ("-n 2 --max-restarts 1 --min-processes 3 x.py", "3 is more than the 2 proce"),
        ("-n 2 --min-processes 1 x.py", "--min-processes needs restarts"),
        ("--check x.py", "--check runs a program of its own: leave out script"),
        ("-n 1:2 --max-restarts 1 --nodes 2 x.py", "--min-processes works on one ma"),
        ("-n 1:2 --max-restarts 1 --print slurm x.py", "--min-processes has no meanin"),
        *(
            (f"-n {n} --max-restarts 1 --wait-for-replacement={seconds} x.py", text)
            for n, seconds, text in [
                ("2", "5", "--wait-for-replacement needs --min-processes"),
                ("1:2", "-1", "--wait-for-replacement: '-1' is not a time in seconds"),
                ("1:2", "inf", "-for-replacement: 'inf' is not a time in seconds"),
            ]
        ),
        ("--nodes 3:2 x.py", "--nodes 3:2 has its larger number first"),
        ("--nodes 1:2 x.py", "--nodes M:N needs restarts: add --max-restarts"),
        ("--nodes 1:2 --max-restarts 1 --print k8s x.py", "--nodes M:N has no meaning"),
        (
            "--devices-per-process 2 --gpus-per-process 1 x.py",
            "simulates devices on the",
        ),
        ("--nodes 2 --node-rank 2 x.py", "--node-rank 2 is out of range: --nodes is 2"),
        ("--node-rank 1 x.py", "--node-rank 1 is out of range: --nodes is 1"),
        ("--nodes 2 --coordinator a:1 x.py", "--nodes needs --node-rank"),
        ("--nodes 2 --node-rank 0 x.py", "--nodes needs --coordinator host:port"),
        ("--coordinator a x.py", "'a' is not an address. Give it as host:port"),
        ("--coordinator a:0 x.py", "'a:0' is not an address"),
        ("missing.py", "'missing.py' is no file; give the path of a Python script"),
        (".", "'.' is a folder; give the path of a Python script"),
        ("--print pbs x.py", "argument --print: invalid choice: 'pbs'"),
        ("-n 3 --gpus-per-process 1 there.py", "3 GPUs are wanted, CUDA_VISIBLE_DEVIC"),
    ]:
        refused(options, text)


def test_help_tells_the_options_and_the_exit_codes():
    result = command("--help")
    assert result.code == 0
    assert "python -m jaxstrategy.launch -n 4 train.py --epochs 3" in result.out
    parts = "--max-restarts", "--grace", "JAXSTRATEGY_ATTEMPT", "128 + s"
    for part in (*parts, *(f"\n  {code}        " for code in (75, 76, 77, 78))):
        assert part in result.out
    assert max(map(len, result.out.splitlines())) <= 88


def test_a_summary_tells_what_became_of_a_job(launch, tmp_path):
    script = """
    if rank == 1 and attempt == 0:
        sys.exit("the disk is full")
    if attempt == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    """
    launch("-n 2 --max-restarts 1 --grace 0.2 --summary summary.txt", script)
    text = (tmp_path / "summary.txt").read_text()
    assert text.startswith("script ended well after 2 attempts, ")
    assert "Attempt 0: rank 1 failed with exit code 1.\n  the disk is full\n" in text
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    ends = {(row[0], row[1]): row[4] for row in rows if row[0] in ("0", "1")}
    assert ends == {
        ("0", "0"): "killed by the launcher",
        ("0", "1"): "exit code 1",
        ("1", "0"): "exit code 0",
        ("1", "1"): "exit code 0",
    }
    for options, why in [
        ("--print slurm -n 2 --summary s.txt", "--summary tells of processes"),
        ("--workers 2 --summary s.txt", "--summary tells of processes"),
        ("--summary none/s.txt", "'none/s.txt'; a file in a folder that exists"),
        ("--summary .", "'.'; a file in a folder that exists"),
    ]:
        refused(f"{options} {__file__}", why)


@pytest.mark.slow
def test_processes_that_replicas_cannot_share_equally_take_no_part(launch):
    script = """
    import jax, numpy as np, jaxstrategy as js
    strategy = js.MultiWorkerMirroredStrategy(num_replicas=4)
    batches = js.batches(np.arange(8.0), 8)
    (batch,) = strategy.experimental_distribute_dataset(batches)
    total = strategy.reduce("sum", batch, axis=0)
    print(strategy.num_replicas_in_sync, strategy.process_count, float(total))
    """
    program = [sys.executable, "-m", "jaxstrategy.launch"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    options = "-n 3 --devices-per-process 1"
    result = launch(options, script, program=program, env=environment)
    assert result.lines == ["[0] 4 2 28.0", "[1] 4 2 28.0"], result
    assert "process 2 of 3 ends, and takes no part: 4 replicas are on 2" in result.err
    assert result.code == 0, result
