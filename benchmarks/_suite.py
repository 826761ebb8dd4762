"""Which scripts a run has, and with which arguments.

A quick run makes fewer comparisons, of the same cases: `--check` holds them against
those of the page. The seconds are limits, on two idle cores, at which a script is
ended; what it has measured until then is kept. A whole run takes at most 25 minutes, a
quick one five.
"""

from __future__ import annotations

import dataclasses

WHOLE, QUICK = 25 * 60, 5 * 60


@dataclasses.dataclass(frozen=True)
class Script:
    """A benchmark of this folder.

    Attributes:
      name: of the file, without its ending.
      arguments: in a whole run.
      seconds: how long it may take then.
      quick: the arguments in a quick run, which leaves it out where this is None.
      quick_seconds: how long it may take then.
      others: whether it takes `--others-python`, an environment with other frameworks.
      needs_others: whether it is left out where that is not given.
    """

    name: str
    arguments: str
    seconds: int
    quick: str | None = None
    quick_seconds: int = 0
    others: bool = False
    needs_others: bool = False


# In the order in which they run: what matters most comes first.
SUITE = (
    Script(
        "train_step",
        "--seconds 2 --devices 2 8",
        190,
        "--seconds 1 --devices 8 --tasks '20 x 8' '30 x 128' transformer",
        45,
        others=True,
    ),
    Script(
        "dispatch",
        "--seconds 2 --devices 1 4 8 --only steps memory",
        100,
        "--seconds 1 --leaves 20 --devices 4 --only steps",
        20,
    ),
    Script(
        "scaling",
        "--replicas 1 2 8 64 --leaves 10 100 1000 --rounds 2",
        120,
        "--replicas 2 8 --leaves 10 100 --rounds 1",
        28,
    ),
    Script(
        "allreduce",
        "--seconds 0.4 --devices 2 8 --only '10 x' '100 x' MLP",
        100,
        "--seconds 0.3 --devices 8 --only '10 x' MLP",
        20,
    ),
    Script(
        "nnx",
        "--seconds 4 --rounds 30",
        85,
        "--seconds 1 --networks '12 dense layers'",
        20,
    ),
    Script(
        "several",
        "--seconds 1 --k 1 10 50 --devices 2 8",
        45,
        "--seconds 1 --k 10 --devices 8",
        15,
    ),
    Script("variables", "--seconds 2 --devices 2 8 --variables 100", 25),
    Script("analysis", "--blocks 6 --rounds 2 --programs 30", 45),
    Script("in_sync", "--seconds 4", 25, "--seconds 1 --devices 8", 12),
    Script("input", "--seconds 2", 50, "--seconds 1 --sizes '28 x 28'", 13),
    Script(
        "multiprocess",
        "--processes 2 --rounds 8",
        65,
        "--processes 2 --rounds 5 --models '4 x 64'",
        20,
        others=True,
    ),
    Script(
        "predictions",
        "--processes 2 4 --rounds 7",
        125,
        "--processes 2 --rounds 2",
        20,
    ),
    Script(
        "meshes",
        "--seconds 2 --rounds 16",
        80,
        "--only dispatch cores --rounds 5 --seconds 1",
        25,
    ),
    Script("sharded", "--seconds 3 --starts 1 --rounds 7", 75),
    Script("checkpoint", "--sizes 100 --rounds 7", 40),
    Script("reduction_limits", "--rounds 12 --seconds 8", 40),
    Script("compressed", "", 40, "--only MLP", 15),
    Script("coordinator", "--rounds 5 --seconds 3", 60, others=True, needs_others=True),
    Script("soak", "--steps 10000", 25),
    Script("recovery", "--processes 2", 20),
    Script("warm_start", "--rounds 1", 70),
    Script("wide", "--leaves 500 10000 --rounds 1", 75, "--leaves 500 --rounds 1", 15),
)
