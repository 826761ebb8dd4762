"""`strategy.visualize`: what lies where, against the shards that JAX has."""

import contextlib
import math
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js


@pytest.fixture
def eight():
    return js.MirroredStrategy()


def over(spec, **sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    return NamedSharding(mesh, PartitionSpec(*spec))


def held(*arrays):
    """The bytes of all shards on each device, by its number."""
    found = dict.fromkeys(range(8), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return found


def by_number(seen):
    return {device.id: nbytes for device, nbytes in seen.device_bytes.items()}


def drawn(seen, path):
    """The devices' names in the picture of an array, row by row from above."""
    html = ElementTree.fromstring(seen._repr_html_())
    picture = next(s for s in html.iter("svg") if s.get("aria-label").startswith(path))
    rows = {}
    for box in picture.iter("rect"):
        if (title := box.find("title")) is not None:
            rows.setdefault(float(box.get("y")), []).append(title.text)
    return [rows[top] for top in sorted(rows)]


def test_bytes_are_those_of_the_shards(eight):
    grid = over(("a", "b"), a=4, b=2)
    arrays = {
        "whole": eight.mirror(np.ones((6, 3), np.float32)),
        "grid": jax.device_put(np.ones((64, 32), np.float32), grid),
        "lone": jnp.ones(5, jnp.int8),
        "versions": eight.per_replica(np.ones((8, 3), np.float16)),
    }
    seen = eight.visualize(arrays)
    versions = arrays.pop("versions").stacked
    assert by_number(seen) == held(*arrays.values(), versions)
    assert [array.path for array in seen.arrays] == [
        "grid",
        "lone",
        "versions",
        "whole",
    ]


@pytest.mark.parametrize(
    ("spec", "sizes", "wanted"),
    [
        ((), {"a": 8}, "whole on each of cpu:0..7"),
        ((), {"a": 1}, "on cpu:0"),
        (("a",), {"a": 8}, "dimension 0 in 8 parts on cpu:0..7"),
        (
            (None, "a"),
            {"a": 4, "b": 2},
            "dimension 1 in 4 parts on cpu:0..7, each on 2 of them",
        ),
        (
            ("a", "b"),
            {"a": 4, "b": 2},
            "dimension 0 in 4 parts, dimension 1 in 2 parts on cpu:0..7",
        ),
        ((("a", "b"),), {"a": 2, "b": 2}, "dimension 0 in 4 parts on cpu:0..3"),
    ],
)
def test_words_say_how_an_array_lies(eight, spec, sizes, wanted):
    kind = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=over(spec, **sizes))
    (array,) = eight.visualize(kind).arrays
    assert str(array) == wanted
    made = jax.device_put(np.ones((8, 8), np.float32), kind.sharding)
    (array,) = eight.visualize(made).arrays
    assert str(array) == wanted


@pytest.mark.parametrize(
    "spec", [("a", "b"), ("b", "a"), (None, "b"), ("a", None), (("a", "b"), None)]
)
def test_the_picture_has_each_part_where_it_is_in_the_array(eight, spec):
    sharding = over(spec, a=4, b=2)
    array = jax.device_put(np.ones((8, 16), np.float32), sharding)
    names = {}
    for shard in array.addressable_shards:
        rows, columns = (part.start or 0 for part in shard.index)
        place = names.setdefault(rows, {}).setdefault(columns, [])
        place.append(f"cpu:{shard.device.id}")
    wanted = [
        [", ".join(names[row][column]) for column in sorted(names[row])]
        for row in sorted(names)
    ]
    if all(len(row) == 1 for row in wanted):  # one divided dimension lies flat
        wanted = [[row[0] for row in wanted]]
    found = drawn(eight.visualize({"x": array}), "x")
    spelled = [[name.replace("cpu:0..3", FOUR) for name in row] for row in found]
    spelled = [[name.replace("cpu:4..7", REST) for name in row] for row in spelled]
    assert spelled == wanted


FOUR, REST = "cpu:0, cpu:1, cpu:2, cpu:3", "cpu:4, cpu:5, cpu:6, cpu:7"


def test_versions_lie_side_by_side_also_where_devices_are_shared(eight):
    x = eight.per_replica(np.ones((8, 2), np.float32))
    assert drawn(eight.visualize({"x": x}), "x") == [[f"cpu:{i}" for i in range(8)]]
    (array,) = eight.visualize(x).arrays
    assert (array.type, str(array)) == (
        "float32[2]",
        "versions of 8 replicas on cpu:0..7",
    )
    shared = js.MirroredStrategy(jax.devices()[:2], replicas_per_device=3)
    x = shared.per_replica(np.ones(6, np.float32))
    (array,) = shared.visualize(x).arrays
    assert str(array) == "versions of 6 replicas on cpu:0, cpu:1"
    assert drawn(shared.visualize({"x": x}), "x") == [["cpu:0", "cpu:1"]]
    lone = js.OneDeviceStrategy("CPU:0")
    (array,) = lone.visualize(lone.per_replica([1.0])).arrays
    assert str(array) == "versions of 1 replica on cpu:0"


def test_several_devices_of_a_replica_are_told():
    cores = js.MirroredStrategy(logical_axes={"core": 2})
    (array,) = cores.visualize(cores.per_replica(np.ones((4, 3)))).arrays
    assert str(array) == "versions of 4 replicas on cpu:0..7, each on 2 of them"


def test_variables_are_seen_as_they_are_kept():
    sharding = js.StateSharding("state", min_bytes=8)
    strategy = js.MirroredStrategy(sharding=sharding)
    with strategy.scope():
        table = js.Variable(np.ones((16, 4), np.float32), name="table")
        small = js.Variable(np.float32(1), name="small")
        seen = js.Variable(
            np.float32(0), name="seen", synchronization="on_read", aggregation="sum"
        )
    found = strategy.visualize([table, small, seen])
    assert [(a.path, a.type, str(a)) for a in found.arrays] == [
        ("0", "float32[16,4]", "dimension 0 in 8 parts on cpu:0..7"),
        ("1", "float32[]", "whole on each of cpu:0..7"),
        ("2", "float32[]", "versions of 8 replicas on cpu:0..7"),
    ]
    assert set(by_number(found).values()) == {2 * 4 * 4 + 4 + 4}
    (alone,) = strategy.visualize(table).arrays
    assert alone.path == "table"


def test_a_step_need_not_copy_variables_that_were_seen(eight):
    with eight.scope():
        v = js.Variable(np.zeros(4, np.float32))
    before = v.cell.is_alone
    repr(eight.visualize(v))
    assert before and v.cell.is_alone


def test_variables_elsewhere_say_where_they_are():
    central = js.experimental.CentralStorageStrategy()
    with central.scope():
        v = js.Variable(np.ones(3, np.float32))
    assert str(central.visualize(v).arrays[0]) == "on cpu:0"
    partitioner = js.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = js.ParameterServerStrategy(
        backend="threads",
        workers=1,
        parameter_servers=2,
        variable_partitioner=partitioner,
    )
    with contextlib.closing(strategy), strategy.scope():
        table = js.Variable(np.ones((4, 3), np.float32), name="table")
        own = js.Variable(np.ones(3), name="own", per_worker_variable=True)
        seen = strategy.visualize({"table": table, "own": own})
        assert [(a.path, a.type, str(a)) for a in seen.arrays] == [
            ("own", "float32[3]", "with a copy on each worker"),
            ("table.0", "float32[2,3]", "on parameter server 0"),
            ("table.1", "float32[2,3]", "on parameter server 1"),
        ]


def test_objects_of_flax_are_looked_into(eight):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    seen = eight.visualize({"model": model})
    assert [(a.path, a.type) for a in seen.arrays] == [
        ("model.bias", "float32[3]"),
        ("model.kernel", "float32[2,3]"),
    ]


def test_an_array_that_is_there_twice_counts_once(eight):
    x = eight.mirror(np.ones(4, np.float32))
    seen = eight.visualize({"a": x, "b": [x]})
    assert by_number(seen) == held(x)


def test_what_lies_on_no_device_is_told(eight):
    gone = eight.mirror(np.ones(4, np.float32))
    gone.delete()
    leaves = [np.ones(3), jax.ShapeDtypeStruct((2,), jnp.float32), 3, gone]
    seen = eight.visualize(leaves)
    assert [(array.type, str(array)) for array in seen.arrays] == [
        ("float64[3]", "in the memory of the host"),
        ("float32[2]", "nowhere yet: a type without a sharding"),
        ("int", "a Python object"),
        ("float32[4]", "nowhere: donated to an earlier call"),
    ]
    assert set(by_number(seen).values()) == {0}
    html = ElementTree.fromstring(seen._repr_html_())
    assert "4 arrays without a picture" in "".join(html.itertext())


def test_it_prints_what_each_device_has_if_they_differ(eight):
    seen = eight.visualize([eight.mirror(np.ones(2, np.float32)), jnp.ones(2)])
    assert str(seen).endswith("on a device\n  cpu:0     16 B\n  cpu:1..7  8 B")
    assert str(seen).startswith("What lies where: 2 arrays, up to 16 B on a device\n")
    html = ElementTree.fromstring(seen._repr_html_())
    texts = ["".join(text.itertext()) for text in html.iter("text")]
    assert texts[:4] == ["cpu:0", "16 B", "each of cpu:1..7", "8 B"]


def test_nothing_is_a_picture_too(eight):
    seen = eight.visualize({}, title="Empty")
    assert str(seen) == "Empty: 0 arrays, 0 B on a device"
    assert "Empty" in seen._repr_html_()


def test_of_many_arrays_the_largest_are_drawn_and_all_are_listed(eight):
    tree = {f"w{i:02}": eight.mirror(np.ones(i + 1, np.int8)) for i in range(20)}
    html = eight.visualize(tree)._repr_html_()
    drawings = re.findall('aria-label="(w..) ', html)
    assert drawings == [f"w{i:02}" for i in range(4, 20)]
    assert [path for path in tree if f">{path}<" in html] == sorted(tree)
    many = {f"w{i:03}": np.ones(1) for i in range(50)}
    text = str(eight.visualize(many)).split("\n")
    assert (len(text), text[-1]) == (43, "  and 10 more")


def test_random_keys_have_a_size(eight):
    seen = eight.visualize(eight.mirror(jax.random.key(0)))
    assert set(by_number(seen).values()) == {8}


def test_names_are_escaped(eight):
    seen = eight.visualize({"<b>&": np.ones(1)}, title="<i>")
    html = ElementTree.fromstring(seen._repr_html_())
    assert "<b>&" in "".join(html.itertext()) and "<i>" in "".join(html.itertext())


def test_it_is_asked_outside_of_steps(eight):
    with pytest.raises(js.ContextError, match="visualize` was called inside `run`"):
        eight.run(lambda: eight.visualize({}))


@pytest.mark.parametrize("arrays", [{"w": 1}, (1,), None])
def test_only_a_strategy_makes_one(arrays):
    with pytest.raises(TypeError, match="A `Visualization` was made of .*visualize"):
        js.Visualization("state", arrays, ())
