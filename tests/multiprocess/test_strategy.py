"""What holds for the replicas of one process holds for those of several."""

import pickle
import traceback

import numpy as np
import pytest
import workers
from workers.conformance import CHECKS, tried

import jaxstrategy as js

# Processes, devices of each, and how many of them a replica has, or replicas a device:
# always four replicas.
LAYOUTS = [
    (2, 2, {}),
    (2, 4, {"logical_axes": {"core": 2}}),
    (2, 1, {"replicas_per_device": 2}),
]
MAIN = "import sys\nfrom workers.conformance import main\nmain(sys.path[0])\n"


@pytest.fixture(scope="module")
def wanted():
    strategy = js.MirroredStrategy(js.simulate(8)[:4])
    return {name: tried(name, strategy) for name in CHECKS}


# One test for all checks of a layout: its processes start once.
@pytest.mark.slow
@pytest.mark.parametrize("count, devices, layout", LAYOUTS)
def test_all_is_as_in_one_process(count, devices, layout, job, tmp_path, wanted):
    env = workers.environment(devices, **layout)
    with job(MAIN, count=count, seconds=60, env=env, started=False) as running:
        assert running.wait(200) == [0] * count
    found = [pickle.loads((tmp_path / f"found{k}").read_bytes()) for k in range(count)]
    wrong = {name: differing(wanted[name], [f[name] for f in found]) for name in CHECKS}
    assert not any(wrong.values()), "\n".join(filter(None, wrong.values()))


def differing(wanted, ranks):
    """What is wrong with the results of a check, empty if nothing is."""
    failed = [text for text in (wanted, *ranks) if isinstance(text, str)]
    if failed:
        return "\n".join(failed)
    try:
        equal([entry for rank in ranks for entry in rank[0]], wanted[0])
        for rank in ranks:
            equal(rank[1], wanted[1])
    except AssertionError:
        return traceback.format_exc()
    return ""


def equal(got, wanted):
    """Raise unless two trees have equal texts, and numbers as equal as rounding."""
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        got, wanted = list(got.values()), list(wanted.values())
    if isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            equal(one, other)
    elif wanted.dtype.kind in "fV":  # bfloat16 is a V
        np.testing.assert_allclose(
            got.astype(np.float32), wanted.astype(np.float32), rtol=1e-5, atol=1e-6
        )
    else:
        np.testing.assert_array_equal(got, wanted)
