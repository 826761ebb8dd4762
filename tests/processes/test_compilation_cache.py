"""One option keeps compiled programs in a folder, where later processes find them."""

import os
import subprocess
import sys

import jax
import pytest
from helpers.launching import ALONE, Launched, command, printed

import jaxstrategy as js

VARIABLE = "JAXSTRATEGY_COMPILATION_CACHE"
OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

STEP = """
import collections, sys
import jax, numpy as np
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **told: counts.update([event]))
import jaxstrategy as js
strategy = js.MirroredStrategy()
counts.clear()
def step(x):
    return js.get_replica_context().all_reduce("sum", x * 2)
x = strategy.mirror(np.float32(3))
counts.clear()
assert strategy.run(step, (x,)) == 12
print(*(counts["/jax/compilation_cache/cache_" + each] for each in ("hits", "misses")))
"""


@pytest.fixture(autouse=True)
def as_before():
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    yield
    js.experimental.compilation_cache(None)
    for name, value in before.items():
        jax.config.update(name, value)


def ran(**variables):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"} | variables
    done = subprocess.run(
        [sys.executable, "-c", STEP],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_process_that_is_started_again_compiles_nothing(tmp_path):
    cache = {VARIABLE: str(tmp_path / "cache")}
    (hits, misses), _ = ran(**cache)
    assert hits == "0" and int(misses) > 0
    assert ran(**cache)[0] == [misses, "0"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    counts, told = ran(**{VARIABLE: str(tmp_path / "file" / "cache")})
    assert counts == ["0", "0"]
    assert told.count("There is no compilation cache in") == 1
    assert "cannot be written (Not a directory)" in told


def test_what_the_option_sets(tmp_path):
    folder = tmp_path / "new" / "cache"
    assert js.experimental.compilation_cache(folder) == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [getattr(jax.config, name) for name in OPTIONS] == [str(folder), 0.0, -1]
    assert (
        js.experimental.compilation_cache("gs://bucket/folder") == "gs://bucket/folder"
    )
    assert js.experimental.compilation_cache(None) is None
    assert jax.config.jax_compilation_cache_dir is None


def test_folders_that_are_not_used(tmp_path):
    with pytest.raises(TypeError, match="`compilation_cache` was given 3; the path of"):
        js.experimental.compilation_cache(3)
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=(
        "There is no compilation cache in .*: everybody can write it, and a program"
    )):  # fmt: skip
        assert js.experimental.compilation_cache(tmp_path) is None
    assert jax.config.jax_compilation_cache_dir is None
    (tmp_path / "file").write_text("")
    done = command("--compilation-cache", str(tmp_path / "file"), "train.py")
    assert done.code == 2 and "is not a folder" in done.err


def test_the_launcher_tells_each_process(tmp_path):
    (tmp_path / "train.py").write_text(
        f"import os; print(os.environ.get({VARIABLE!r}))"
    )
    for given, told in [
        (["--compilation-cache", "cache"], str(tmp_path / "cache")),
        (["--compilation-cache", "gs://bucket/cache"], "gs://bucket/cache"),
    ]:
        run = [sys.executable, "-c", ALONE, *given, "-n", "2", "train.py"]
        result = Launched(tmp_path, run).finish(0)
        assert result.lines == [f"[0] {told}", f"[1] {told}"]


def test_what_clusters_are_given_has_it():
    for cluster in "slurm", "k8s":
        for more in "-n 2", "--workers 2":
            options = f"--compilation-cache /c/ache {more}"
            text = printed(cluster, "t.py", options=options)
            assert VARIABLE in text and "/c/ache" in text
