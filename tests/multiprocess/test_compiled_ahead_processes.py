"""The processes of a job share what is cached."""

import json
import os
import re
import subprocess
import sys

import pytest
import workers

MAIN = "from workers.compiled_ahead import cached\ncached()\n"


@pytest.mark.slow
def test_the_cache_of_a_job_has_the_programs_of_process_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MAIN)
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", "2"]
    command += ["--compilation-cache", str(tmp_path / "cache"), str(script)]

    def started():
        """Of each process: programs that were asked for, and that the cache had."""
        done = subprocess.run(
            command,
            env={**os.environ, **workers.environment(1)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"^\[(\d)\] cached (.*)$", done.stdout, re.MULTILINE)
        return [json.loads(counts) for _, counts in sorted(found)]

    first, other = started()
    assert first[0] > 0 == first[1]
    assert other[0] > 0 == other[1]
    (asked, found), other = started()
    assert asked == first[0] == found
    # JAX's keys differ between processes on CPUs. Where this fails, JAX has come to
    # share programs between them, and `js.experimental.compilation_cache` can say so.
    assert other[0] > other[1]
