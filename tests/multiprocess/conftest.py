"""Jobs of real processes, and meetings of threads, which are faster."""

import concurrent.futures

import harness
import pytest
import ray_machines
from harness import Secret, Store


@pytest.fixture
def job(tmp_path):
    """Starts a job: `with job(script, count=2) as running`."""

    def started(script="", **options):
        return harness.job(tmp_path, script, **options)

    return started


@pytest.fixture(scope="session")
def ray():
    with ray_machines.running() as started:
        yield started


@pytest.fixture
def pool():
    """Threads that stand for processes."""
    with concurrent.futures.ThreadPoolExecutor(16) as made:
        yield made


@pytest.fixture
def address():
    return harness.free_address()


@pytest.fixture
def join():
    """`harness.meet`, whose connections are closed after the test."""
    meetings = []

    def joined(*arguments):
        meetings.append(harness.meet(*arguments))
        return meetings[-1]

    yield joined
    for meeting in meetings:
        meeting.close()


@pytest.fixture
def attend(address, join):
    """`attend(index)` meets the others, as one of a job of two."""

    def attended(index, count=2, word="", seconds=20, at=None, job=""):
        told = {"host": f"h{index}", "pid": index, "versions": harness.VERSIONS}
        told["job"] = job
        return join(index, count, at or address, seconds, told, Secret(word))

    return attended


@pytest.fixture
def board():
    """`board(meeting)`, which leaves after the test."""
    made = []

    def of(meeting, **options):
        made.append(Store(meeting, **options))
        return made[-1]

    yield of
    for each in reversed(made):  # process 0 waits for the others
        each.fail("the test is over")


@pytest.fixture
def meet(address, join):
    """Has several processes meet, played by threads; what each got or raised."""

    def attend(number, guest):
        told = {
            "host": f"host{number}",
            "pid": 100 + number,
            "versions": harness.VERSIONS,
        }
        told |= {k: v for k, v in guest.items() if k in ("host", "versions", "job")}
        try:
            return join(
                guest["index"],
                guest["count"],
                guest.get("coordinator", address),
                guest.get("seconds", 10),
                told,
            )
        except Exception as error:
            return error

    def meeting(*guests):
        with concurrent.futures.ThreadPoolExecutor(len(guests)) as pool:
            return list(pool.map(attend, range(len(guests)), guests))

    return meeting


@pytest.fixture
def boards(meet, board):
    """Boards of `count` processes, all in this one."""

    def of(count, **options):
        meetings = meet(*({"index": k, "count": count} for k in range(count)))
        wrong = [each for each in meetings if isinstance(each, Exception)]
        assert not wrong, wrong
        return [board(meeting, **options) for meeting in meetings]

    return of
