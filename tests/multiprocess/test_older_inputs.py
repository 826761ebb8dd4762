"""Iterators of TensorFlow 1 and 2018 over processes, each of which reads its shard."""

import json
import re

import numpy as np
import workers

SCRIPT = "from workers.older_inputs import main\nmain()"
COUNT, OWN = 2, 2


def test_each_process_reads_its_shard(job):
    env = workers.environment(OWN)
    with job(SCRIPT, count=COUNT, seconds=40, env=env, started=False) as running:
        assert running.wait(90) == [0] * COUNT
        told = [
            json.loads(re.search("^told (.*)$", rank.output, re.M)[1])
            for rank in running.ranks
        ]
    rows = [np.arange(22)[rank::COUNT] for rank in range(COUNT)]
    # Of 11 elements each, the last has no fellow.
    elements = [shard[:10].reshape(5, OWN) for shard in rows]
    for rank, found in enumerate(told):
        assert found["elements"] == elements[rank].tolist()
        assert found["again"] == elements[rank][0].tolist()
        assert found["uneven"] == [[0, 1], [2, 3]]
        totals = np.sum(elements, axis=(0, 2))
        assert found["sums"] == totals[[1, 3]].tolist()
        assert found["towers"] == 2 + 3 + 102 + 103
        assert found["once"].startswith("Only one pass can read the generator")
    for batch in range(2):
        seen = [
            row for found in told for part in found["global"][batch] for row in part
        ]
        assert len(set(seen)) == 8
    everything = [found["global"] for found in told]
    assert sorted(np.ravel(everything).tolist()) == list(range(16))
