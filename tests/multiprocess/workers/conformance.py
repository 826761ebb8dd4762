"""What a strategy promises, tried on the replicas of one process or of several.

Each check returns what it has seen, by name. Under `"own"` stands a list with an entry
for each replica of this process; everything else must be the same in all processes.
"""

import io
import pickle
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js
from workers import LAYOUT

CHECKS = {}


def check(fn):
    CHECKS[fn.__name__] = fn
    return fn


def versions(s, shape=(), seed=0):
    """A version for each replica."""
    draw = np.random.default_rng(seed)
    return draw.normal(size=(s.num_replicas_in_sync, *shape)).astype(np.float32)


def context():
    return js.get_replica_context()


@check
def what_replicas_and_processes_there_are(s):
    ids = s.run(lambda: context().replica_id_in_sync_group)
    n = s.run(lambda: context().num_replicas_in_sync)
    assert n == s.num_replicas_in_sync == len(s.devices)
    assert sorted(s.devices, key=lambda d: (d.process_index, d.id)) == list(s.devices)
    return {
        "own": s.experimental_local_results(ids),
        "all": s.gather(s.run(lambda i: i[None], (ids,))),
    }


@check
def collectives_in_a_step(s):
    x = versions(s, (3,))

    def step(x):
        c = context()
        found = {op: c.all_reduce(op, x) for op in ("sum", "mean")}
        found["gathered"] = c.all_gather(x[None], 0)
        found["gradient"] = jax.grad(lambda x: (c.all_reduce("sum", x) ** 2).sum())(x)
        return found

    found = s.run(step, (s.per_replica(x),))
    np.testing.assert_allclose(found["sum"], x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(found["mean"], x.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(found["gathered"], x)
    assert isinstance(found["gathered"], js.Mirrored)
    return found


@check
def reduce(s):
    x = versions(s, (4, 2))
    value = s.per_replica(x)
    weights = np.arange(x.shape[0] * 4.0).reshape(-1, 4).astype(np.float32)
    found = {
        "sum": (s.reduce("sum", value), x.sum(0)),
        "mean": (s.reduce("mean", value), x.mean(0)),
        "rows": (s.reduce("mean", value, axis=0), x.mean((0, 1))),
        "weighted": (
            s.reduce("mean", value, axis=0, weights=s.per_replica(weights)),
            np.average(x.reshape(-1, 2), axis=0, weights=weights.ravel()),
        ),
        "of mirrored": (s.reduce("sum", s.mirror(2.0)), 2.0 * len(x)),
        "of a number": (s.reduce("sum", 3), 3 * len(x)),
    }
    for got, wanted in found.values():
        assert isinstance(got, js.Mirrored)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    return {name: got for name, (got, _) in found.items()}


@check
def gather(s):
    x = versions(s, (2, 3))
    value = s.per_replica(x)
    np.testing.assert_array_equal(s.gather(value), x.reshape(-1, 3))
    np.testing.assert_array_equal(s.gather(value, axis=1), np.concatenate(x, axis=1))
    return {"rows": s.gather(value)}


@check
def local_results(s):
    x = versions(s, (2,))
    value = s.per_replica(x)
    own = s.experimental_local_results(value)
    first = s._replicas.local_ids[0] if len(own) < len(x) else 0
    for i, version in enumerate(own):
        np.testing.assert_array_equal(version, x[first + i])
        np.testing.assert_array_equal(value.local(first + i), x[first + i])
    assert len(value.values) == len(own)
    # Each on a device of its own, and yet computed together.
    np.testing.assert_allclose(sum(own), x[first : first + len(own)].sum(0), 1e-6)
    tree = s.experimental_local_results({"a": value, "b": s.mirror(1.0), "c": 3})
    assert [set(entry) for entry in tree] == [{"a", "b", "c"}] * len(own)
    assert s.experimental_local_results("plain") == ("plain",)
    if len(own) < len(x):
        elsewhere = 0 if first else len(x) - 1
        try:
            value.local(elsewhere)
        except IndexError as error:
            assert f"Replica {elsewhere} was asked of a value" in str(error)
            assert f"this process has replicas {first} to" in str(error)
        else:
            raise AssertionError("a replica of another process was given")
    return {"own": own}


@check
def what_is_mirrored_is_process_0s(s):
    own = jax.process_index()
    tree = {
        "host": np.arange(3.0, dtype=np.float32) + 10 * own,
        "device": jnp.arange(2) + own,
        "number": 1.5 + own,
        "key": jax.random.key(own),
        "text": "same",
        "flag": True,
        "half": np.full(2, 1 + own, jnp.bfloat16),
    }
    placed = s.mirror(tree)
    np.testing.assert_array_equal(placed["host"], [0, 1, 2])
    np.testing.assert_array_equal(placed["device"], [0, 1])
    assert placed["number"] == 1.5 and placed["text"] == "same" and placed["flag"]
    data = jax.random.key_data(placed["key"])
    np.testing.assert_array_equal(data, jax.random.key_data(jax.random.key(0)))
    again = s.mirror(placed["host"])
    s.assert_in_sync(placed)
    draws = s.run(lambda key: jax.random.normal(key, (2,)), (placed["key"],))
    np.testing.assert_array_equal(draws, jax.random.normal(jax.random.key(0), (2,)))
    return {"again": again, "draws": draws, "half": placed["half"]}


@check
def init(s):
    """It is process 0's, whatever the others give and have."""
    own = jax.process_index()

    def create(key, bias):
        w = jax.random.normal(key, (3, 2)) + jax.process_index()
        return {"w": w, "b": bias + jnp.zeros(2), "n": 4}

    state = s.init(create, jax.random.key(7 + own), np.float32(2 + own))
    assert isinstance(state["w"], js.Mirrored) and state["n"] == 4
    s.assert_in_sync(state)
    np.testing.assert_array_equal(state["b"], [2, 2])
    np.testing.assert_allclose(
        state["w"], jax.random.normal(jax.random.key(7), (3, 2)), rtol=1e-6
    )
    return state


@check
def mirrored_variables(s):
    own = jax.process_index()
    with s.scope():
        v = js.Variable(np.float32(5 + own))  # process 0's counts
        w = js.Variable(np.zeros(2, np.float32), aggregation="mean")
    seen = [float(v.value())]

    @s.run
    def step(x):
        v.assign_add(1.0)
        w.assign(x)
        return v.value()

    x = versions(s, (2,))
    seen.append(float(step(s.per_replica(x))))
    np.testing.assert_allclose(w.value(), x.mean(0), rtol=1e-5)
    v.assign(20.0 + own)
    seen.append(float(v.value()))
    v.assign_add(2.0)
    seen.append(float(v.value()))
    s.extended.update(v, lambda v, a: v.assign_sub(a), args=(1.0,))
    seen.append(float(v.value()))
    s.assert_in_sync(v)
    assert seen == [5, 6, 20, 22, 21]
    here = [d for d in s.devices if d.process_index == own]
    assert len(s.experimental_local_results(v)) == len(here)
    return {"seen": seen, "w": w.value(), "host": js.to_host(w)}


@check
def on_read_variables(s):
    own = jax.process_index()
    n = s.num_replicas_in_sync
    with s.scope():
        total = js.Variable(0.0, synchronization="on_read", aggregation="sum")
        mean = js.Variable(1.0 + own, synchronization="on_read", aggregation="mean")
        apart = js.Variable(np.zeros(2, np.float32), synchronization="on_read")

    def step():
        i = context().replica_id_in_sync_group + 1.0
        total.assign_add(i)
        mean.assign_add(i)
        apart.assign(jnp.stack([i, -i]))

    s.run(step)
    seen = [float(total.value()), float(mean.value())]
    assert seen == [n * (n + 1) / 2, 1 + (n + 1) / 2]
    copies = s.experimental_local_results(apart)
    total.assign(12.0)
    mean.assign(3.0 + own)
    seen += [float(total.value()), float(mean.value())]
    assert seen[2:] == [12, 3]
    total.assign_add(1.0)
    seen.append(float(total.value()))
    assert seen[-1] == 13
    return {"own": copies, "seen": seen, "all": js.to_host(apart)}


@check
def assert_in_sync_finds_what_differs(s):
    n = s.num_replicas_in_sync
    same = s.mirror(np.zeros(3, np.float32))
    last = s._replicas.devices_of(n - 1)
    by_hand = [
        jax.device_put(np.float32([0, 0, shard.device in last]), shard.device)
        for shard in same.addressable_shards
    ]
    broken = jax.make_array_from_single_device_arrays((3,), same.sharding, by_hand)
    apart = s.per_replica([1] * (n - 1) + [2])
    s.assert_in_sync({"same": same, "version": s.per_replica([3.0] * n)})
    try:
        s.assert_in_sync({"same": same, "broken": broken, "apart": apart}, "state")
    except js.errors.OutOfSyncError as error:
        groups = tuple(range(n - 1)), (n - 1,)
        # Replicas that share a device have the same copy of what is mirrored.
        shared = n - s._replicas.per_device
        broken = tuple(range(shared)), tuple(range(shared, n))
        assert error.leaves == {"state['apart']": groups, "state['broken']": broken}
        return {}
    raise AssertionError("nothing was found")


@check
def ways_to_reduce(s):
    x = versions(s, (300,))
    trees = {"a": x[:, :5], "b": x, "c": x[:, 0]}
    found = {}
    for options in (
        {"implementation": "ring"},
        {"implementation": "nccl", "bytes_per_pack": 64},
        {"reduce_dtype": jnp.float32, "bytes_per_pack": 1 << 20},
    ):
        communication = js.experimental.CommunicationOptions(**options)
        if isinstance(s, js.MirroredStrategy):
            other = js.MirroredStrategy(s.devices, communication_options=communication)
        else:
            other = js.MultiWorkerMirroredStrategy(None, communication, **LAYOUT)
        summed = other.run(
            lambda tree: context().all_reduce("sum", tree), (other.per_replica(trees),)
        )
        for key, value in trees.items():
            np.testing.assert_allclose(summed[key], value.sum(0), rtol=1e-4, atol=1e-5)
        found[str(options)] = summed
    options = js.experimental.CommunicationOptions(
        implementation="ring", bytes_per_pack=100
    )
    found["eager"] = s.reduce("mean", s.per_replica(trees), options=options)
    return found


@check
def compressed_gradients(s):
    found = {"own": []}
    grads = {"b": versions(s, (3,)), "w": versions(s, (16, 40), seed=1)}
    params = jax.tree.map(lambda g: g[0], grads)
    levels = {"implementation": "hierarchical", "groups": [[0, 1], [2, 3]]}
    cases = {
        "int8": {"compression": "int8"},
        "in levels": {"compression": "int8", **levels},
        "thin": {"compression": js.experimental.PowerSGD(2)},
    }
    for name, chosen in cases.items():
        options = js.experimental.CommunicationOptions(**chosen)
        tx = js.optax.all_reduce_gradients(options=options)
        state = s.init(tx.init, params)
        with s.scope():
            assert jax.tree.all(jax.tree.map(alike, state, tx.init(params)))
        step = s.run(tx.update)
        for _ in range(2):
            means, state = step(s.per_replica(grads), state)
        s.assert_in_sync((means, state.bases))
        found[name] = means
        found["own"].append(s.experimental_local_results(state.errors["w"]))
    found["own"] = list(zip(*found["own"], strict=True))
    return found


def alike(one, other):
    pairs = [np.asarray(x.addressable_data(0)) for x in (one, other)]
    assert one.sharding == other.sharding and one.shape == other.shape
    return np.allclose(*pairs, rtol=1e-6)


@check
def donated_arguments(s):
    @s.run(options=js.RunOptions(donate_argnums=0))
    def step(w, x):
        return w + context().all_reduce("sum", x)

    w = s.mirror(np.zeros(2, np.float32))
    x = s.per_replica(versions(s, (2,)))
    new = step(w, x)
    try:
        step(w, x)
    except js.errors.DonatedValueError:
        return {"new": step(new, x)}
    raise AssertionError("a donated array was taken again")


@check
def reading(s):
    x = versions(s, (2,))
    value, same = s.per_replica(x), s.mirror(np.float32(2.5))
    with s.scope():
        v = js.Variable(3.0)
        c = js.Variable(1.0, synchronization="on_read", aggregation="sum")
    out = io.StringIO()
    for thing in (same, value, v, c, s, {"a": (same, value)}, s.mirror(np.ones(3))):
        print(thing, repr(thing), file=out)
        if hasattr(thing, "_repr_html_"):
            print(thing._repr_html_(), file=out)
    assert float(same) == 2.5 and f"{float(same):.1f}" == "2.5" and same.item() == 2.5
    assert f"{same:.2f}" == "2.50" and int(s.mirror(3)) == 3 and bool(s.mirror(1))
    assert np.asarray(same) == 2.5 and jax.device_get(same) == 2.5
    assert float(c.value()) == s.num_replicas_in_sync and float(v) == 3.0
    host = js.to_host({"x": value, "same": same, "v": v, "c": c, "n": 1, "t": "t"})
    np.testing.assert_array_equal(host["x"], x)
    host["sum"] = float(same + same)  # with plain jax.numpy
    host["jit"] = float(jax.jit(lambda a: a * 2)(same))
    return host


@check
def inside_the_users_own_jit(s):
    x = s.per_replica(versions(s, (2,)))

    @jax.jit
    def twice(w, x):
        for _ in range(2):
            w = s.run(lambda w, x: w + context().all_reduce("sum", x), (w, x))
        return w

    return {"w": twice(s.mirror(np.zeros(2, np.float32)), x)}


def told(found):
    """What a check returned, as the host sees it."""
    own = [jax.tree.map(np.asarray, entry) for entry in found.pop("own", [])]
    same = {key: jax.tree.map(np.asarray, value) for key, value in found.items()}
    return own, same


def tried(name, strategy):
    """What a check has seen, or how it failed."""
    try:
        return told(CHECKS[name](strategy))
    except Exception:
        return traceback.format_exc()


def main():
    strategy = js.MultiWorkerMirroredStrategy(**LAYOUT)
    found = {}
    for name in CHECKS:
        found[name] = tried(name, strategy)
    with open(f"{sys.path[0]}/found{jax.process_index()}", "wb") as file:
        pickle.dump(found, file)
