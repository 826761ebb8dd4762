"""Steps that several processes compile, save and load before they call them."""

import collections
import contextlib
import json
import os
import pathlib
import shutil
import sys

import jax
import numpy as np

import jaxstrategy as js
from workers import LAYOUT

START = np.array([0.5, -1.0, 2.0], np.float32)
ROWS = np.random.default_rng(3).normal(size=(12, 3)).astype(np.float32)
STEPS = 40  # more than the first ones, each of which is compared
ASKED = "/jax/compilation_cache/compile_requests_use_cache"
FOUND = "/jax/compilation_cache/cache_hits"
FOLDER = pathlib.Path(sys.path[0])


def step(w, x):
    """A step of gradient descent on `mean((row . w) ** 2)` over all replicas."""
    grad = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - 0.1 * js.get_replica_context().all_reduce("mean", grad)


def descent(steps):
    """The same by NumPy."""
    w = START
    for _ in range(steps):
        w = w - 0.1 * (2 * ROWS * (ROWS @ w)[:, None]).mean(0)
    return w


def made():
    """A strategy, the types of the step's arguments, and its second argument."""
    options = js.experimental.CommunicationOptions(timeout_seconds=30)
    s = js.MultiWorkerMirroredStrategy(communication_options=options, **LAYOUT)
    n = s.num_replicas_in_sync
    types = jax.ShapeDtypeStruct((3,), np.float32)
    parts = js.PerReplica(jax.ShapeDtypeStruct((n, 12 // n, 3), np.float32))
    return s, (types, parts), s.per_replica(ROWS.reshape(n, -1, 3))


def descends(train, x):
    w = START
    for _ in range(STEPS):
        w = train(w, x)
    np.testing.assert_allclose(w, descent(STEPS), rtol=1e-4)


def save():
    s, types, x = made()
    train = s.compile(step, types)
    descends(train, x)
    train.save(FOLDER / "train")
    counts_numbers(s)


def counts_numbers(s):
    """A state begins with a number of Python, as that of Flax does, and has arrays."""

    def counted(state):
        return {"step": state["step"] + 1, "w": 2 * state["w"]}

    for state in ({"step": 0, "w": 1.0}, {"step": 0, "w": np.float32(1)}):
        for types in (state, jax.eval_shape(lambda state: state, state)):
            train, now = s.compile(counted, (types,)), state
            for _ in range(3):
                now = train(now)
            assert (int(now["step"]), float(now["w"])) == (3, 8.0)


def load():
    s, types, x = made()
    compiled = []

    def replies(event, seconds, **told):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(told.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(replies)
    descends(s.load_compiled(FOLDER / "train", step, types), x)
    assert "jit(step)" not in compiled, compiled
    s.run(step, (START, x))  # which is compiled, as the oracle of the line before
    assert "jit(step)" in compiled, compiled


def cached():
    """Counts the programs that the compilation cache has, by what JAX reports."""
    counts = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    s, _, x = made()
    descends(s.run(step), x)
    print("cached", json.dumps([counts[ASKED], counts[FOUND]]))


def differ():
    """Tells what each process is told where they differ."""
    s, types, x = made()
    own = jax.process_index()
    told = {}

    @contextlib.contextmanager
    def telling(case):
        try:
            yield
        except (
            js.ClusterError,
            js.errors.CompiledStepError,
            OSError,
            ValueError,
        ) as error:
            told[case] = [type(error).__name__, str(error)]

    by = 0.1 + own  # compiled in

    def other(w, x):
        return by * step(w, x)

    def broken(w, x):
        if own:
            raise ValueError("this process has no rate")
        return step(w, x)

    with telling("code"):
        s.compile(other, types)
    with telling("shapes"):
        s.compile(step, (jax.ShapeDtypeStruct((3 + own,), np.float32), types[1]))
    with telling("steps"):
        s.compile(broken if own else step, types)
    with telling("one reduces"):
        s.reduce("sum", s.per_replica(ROWS[: s.num_replicas_in_sync])) if own else (
            s.compile(step, types)
        )
    with telling("a step that raises"):
        s.compile(broken, types)
    mine, its = FOLDER / f"train.{own}-of-2", FOLDER / "train.0-of-2"
    s.compile(step, types).save(FOLDER / "train")
    s.reduce("sum", s.per_replica(np.ones(s.num_replicas_in_sync)))  # both have saved
    if own:
        shutil.copy(its, mine)
    with telling("a file of another process"):
        s.load_compiled(FOLDER / "train", step, types)
    if own:
        os.unlink(mine)
    with telling("no file"):
        s.load_compiled(FOLDER / "train", step, types)
    # Where one can load and the other cannot, each may do what it can.
    train = s.compile(step, types) if own else s.load_compiled(its.with_suffix(""), *(
        step, types
    ))  # fmt: skip
    with telling("a call"):
        train(np.zeros(3 + own, np.float32), x)
    descends(train, x)
    print("told", json.dumps(told))
