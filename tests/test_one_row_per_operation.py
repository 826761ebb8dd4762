"""What distinguishes the reduce operations stands in one table."""

import re
from pathlib import Path

import jaxstrategy as js
from jaxstrategy.reductions._reduce_operations import OPERATIONS

PACKAGE = Path(js.__file__).parent
BRANCH = re.compile(r"(?:\bis |\bis not |[!=]= |\bin \(|\bcase )ReduceOp\.")


def test_each_operation_has_a_row():
    assert list(OPERATIONS) == list(js.ReduceOp)


def test_nobody_else_tells_operations_apart():
    branches = [
        f"{path.name}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if BRANCH.search(line) and ">>>" not in line
    ]
    assert not branches


def test_a_branch_would_be_found():
    for line in ("if op is ReduceOp.SUM:", "op in (ReduceOp.MIN, ReduceOp.MAX)"):
        assert BRANCH.search(line)
    assert not BRANCH.search("replica.all_reduce(ReduceOp.MIN, finite)")
