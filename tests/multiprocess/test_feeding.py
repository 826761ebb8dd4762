"""Each process reads its own rows, and all take the same number of steps."""

import json
import re

import numpy as np
import pytest
import workers

SCRIPT = "from workers.feeding import main\nmain()"


# Processes, replicas of each, devices of each, and how the replicas lie on them.
LAYOUTS = [
    pytest.param((2, 1, 1, {}), id="2x1", marks=pytest.mark.slow),
    pytest.param((2, 2, 2, {}), id="2x2"),
    pytest.param(
        (2, 2, 4, {"logical_axes": {"core": 2}}), id="cores", marks=pytest.mark.slow
    ),
    pytest.param(
        (2, 4, 1, {"replicas_per_device": 4}), id="shared", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param


def expected(count, own):
    """What each process, with so many replicas, is given, by a plain loop."""
    n = count * own
    each = 8 // n
    batches = [np.arange(start, min(start + 8, 22.0)) for start in (0, 8, 16)]

    def of(rank, batches):
        mine = range(rank * own, (rank + 1) * own)
        return [
            [batch[i * each : (i + 1) * each].tolist() for i in mine]
            for batch in batches
        ]

    def alone(rank):
        data = 100.0 * rank + np.arange(8.0 + 5 * rank)
        parts = [data[i : i + 2].tolist() for i in range(0, len(data), 2)]
        most = max(-(-len(range(8 + 5 * k)) // (2 * own)) for k in range(count))
        parts += [[]] * (most * own - len(parts))
        return [parts[i : i + own] for i in range(0, len(parts), own)]

    sums = [
        [sum(map(sum, sum(step, []))), sum(map(len, sum(step, [])))]
        for step in zip(*map(alone, range(count)), strict=True)
    ]
    return [
        {
            "rows": of(rank, batches),
            "sums": [[float(batch.sum()), len(batch)] for batch in batches],
            "dropped": of(rank, batches[:2]),
            "uneven": alone(rank),
            "uneven sums": sums,
            "after": [[28.0, 8]],
            "optional": [True, of(rank, batches[:1])],
        }
        for rank in range(count)
    ]


def test_all_is_as_a_plain_loop_has_it(layout, job):
    count, replicas, devices, lie = layout
    env = workers.environment(devices, **lie)
    with job(SCRIPT, count=count, seconds=40, env=env, started=False) as running:
        assert running.wait(90) == [0] * count
        told = [
            json.loads(re.search("^told (.*)$", rank.output, re.M)[1])
            for rank in running.ranks
        ]
        for found, wanted in zip(told, expected(count, replicas), strict=True):
            for name, value in wanted.items():
                assert found[name] == value, name
            # What is left after the first batch: of two epochs, and of what is uneven.
            for name, left in {
                "resumed": 2 * 32 // 8 - 1,
                "resumed alone": len(wanted["uneven"]) - 1,
            }.items():
                whole, again = found[name]
                assert again == whole and len(whole) == left
            n = count * replicas
            assert found["spec"] == f"PerReplica(float32[{8 // n}] x {n})"
        for own, found in enumerate(told):  # the first batches differ in size
            seen = [row for step in found["sizes"] for rows in step for row in rows]
            assert seen == list(np.arange(8.0 * (1 + own)))
        # Each epoch has each row once, in an order that the processes agree on.
        for epoch in (slice(0, 2), slice(2, 4)):
            seen = [row for f in told for step in f["shuffled"][epoch] for row in step]
            assert sorted(sum(seen, [])) == list(np.arange(16.0))
