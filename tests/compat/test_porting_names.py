"""The table of old names: each leads to something that is here, and none is missing."""

import inspect

from helpers.oracle import found_at, recorded
from helpers.porting import tables

SYMBOLS = recorded("tf_surface.json")["symbols"]
# What `tf.contrib.distribute` of TensorFlow 1.12 exports, and functions of its modules.
OF_2018 = """
AllReduceCrossTowerOps CollectiveAllReduceStrategy CrossTowerOps DistributeConfig
DistributionStrategy MirroredStrategy Monitor OneDeviceStrategy ParameterServerStrategy
ReductionToOneDeviceCrossTowerOps Step StandardInputStep StandardSingleLossStep
TowerContext TPUStrategy get_cross_tower_context get_distribution_strategy
get_loss_reduction get_tower_context has_distribution_strategy require_tower_context
run_standard_tensorflow_server UpdateContext get_update_device increment_var
""".split()


def test_each_name_leads_somewhere_or_has_advice():
    names = [*SYMBOLS, *(f"tf.contrib.distribute.{name}" for name in OF_2018)]
    assert [name for name in names if name not in tables.NAMES] == []
    for row in tables.ROWS:
        if row.new is not None:
            assert found_at(row.new) is not None, row
    for row in tables.ROWS:
        assert row.new is not None or len(row.text) > 15, row
        assert "\n" not in row.text and not row.text.endswith("."), row
    assert tables.row_of("tf.optimizers.Adam").old == "tf.optimizers"
    assert tables.row_of("tf.distribute.MirroredStrategy.run").new is not None
    assert tables.row_of("tf.distribute.NoSuchName").old == "tf"
    assert tables.row_of("tf.float32.max").old == "tf"


def test_forms_of_calls_are_those_of_the_new_function():
    for row in tables.ROWS:
        if row.pattern is None or row.new is None:
            continue
        try:
            parameters = inspect.signature(found_at(row.new)).parameters
        except (TypeError, ValueError):
            continue
        kinds = [p.kind for p in parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            by_place = [
                kind
                for kind in kinds
                if kind
                in (
                    inspect.Parameter.POSITIONAL_ONLY,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                )
            ]
            assert row.pattern.positional <= len(by_place), row
        for name in filter(None, row.pattern.keywords.values()):
            kind = parameters[name].kind
            assert kind is not inspect.Parameter.POSITIONAL_ONLY, row
