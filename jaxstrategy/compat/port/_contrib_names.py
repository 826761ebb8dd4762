"""The names of `tf.contrib.distribute`, TensorFlow 1.7 to 1.12."""

from jaxstrategy.compat.port._name import Name, decided, modules, renamed
from jaxstrategy.compat.port._v1_names import variables

_HERE = "jaxstrategy.compat.contrib"

CONTRIB: list[Name] = [
    *variables("tf.contrib.distribute", _HERE),
    *modules([("tf.contrib.distribute", _HERE)]),
    *renamed(
        "tf.contrib.distribute",
        _HERE,
        "AllReduceCrossTowerOps Monitor ReductionToOneDeviceCrossTowerOps "
        "CollectiveAllReduceStrategy CrossTowerOps DistributionStrategy "
        "MirroredStrategy OneDeviceStrategy ParameterServerStrategy TPUStrategy "
        "TowerContext UpdateContext Step StandardInputStep StandardSingleLossStep "
        "get_cross_tower_context get_distribution_strategy get_loss_reduction "
        "get_tower_context get_update_device has_distribution_strategy increment_var "
        "require_tower_context",
        {
            "CollectiveAllReduceStrategy": "`TF_CONFIG` is read; one process per host, "
            "started by `python -m jaxstrategy.launch`",
            "DistributionStrategy": "no sessions: methods do their work at once. A "
            "tower function is traced once for all towers; `tower_id` is traced there",
            "Monitor": "takes no session",
            "StandardSingleLossStep": "takes an optimizer of Optax, and a loss whose "
            "variables were made before; a mean loss is to be divided by `num_towers`",
            "MirroredStrategy": "`num_gpus` takes the first accelerators",
            "TowerContext": "`tower_id` is traced in a tower: `jnp.where` instead of "
            "`if`; `device` has the devices of all towers",
            "get_loss_reduction": "MEAN: nobody records losses here. Optimizers of "
            "2018 divided mean losses by `num_towers`; Optax does not: divide "
            "them yourself",
            "get_update_device": "one call serves all copies: their devices, a tuple",
        },
    ),
    *decided(
        "tf.contrib.distribute",
        {
            "DistributeConfig": "configures Estimators: write the training loop, and "
            "start processes with `python -m jaxstrategy.launch`",
            "run_standard_tensorflow_server": "not needed: start processes with "
            "`python -m jaxstrategy.launch`; `js.Server` if a program must wait",
        },
    ),
]
