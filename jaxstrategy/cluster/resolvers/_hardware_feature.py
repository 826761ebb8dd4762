"""What the hardware of a TPU can do: `HardwareFeature`."""

from __future__ import annotations

import enum
from typing import NamedTuple, final

from jaxstrategy.text._shown import shown


class EmbeddingFeature(enum.Enum):
    """The generation of the units of a TPU that look up embeddings."""

    UNSUPPORTED = "UNSUPPORTED"
    V1 = "V1"
    V2 = "V2"


class TPUHardwareFeature(NamedTuple):
    """What a topology says of the hardware.

    Attributes:
      embedding_feature: the generation, as TensorFlow's messages number it.
    """

    embedding_feature: int


@final
class HardwareFeature:
    """The units of a TPU besides its cores.

    Args:
      tpu_hardware_feature_proto: the `tpu_hardware_feature` of a resolver, or
        TensorFlow's message of that name.

    >>> import jaxstrategy as js
    >>> resolver = js.cluster_resolver.TPUClusterResolver("local")
    >>> resolver.set_tpu_topology(bytes.fromhex("2a020802"))  # of TensorFlow
    >>> feature = resolver.tpu_hardware_feature
    >>> js.tpu.experimental.HardwareFeature(feature).embedding_feature.name
    'V2'
    """

    EmbeddingFeature = EmbeddingFeature

    def __init__(self, tpu_hardware_feature_proto: object) -> None:
        self.tpu_hardware_feature_proto = tpu_hardware_feature_proto

    @property
    def embedding_feature(self) -> EmbeddingFeature:
        """The units that look up embeddings.

        Raises:
          ValueError: what was given does not say.
        """
        number = getattr(self.tpu_hardware_feature_proto, "embedding_feature", None)
        features = list(EmbeddingFeature)
        if not isinstance(number, int) or not 0 <= number < len(features):
            raise ValueError(
                "`HardwareFeature` was given "
                f"{shown(self.tpu_hardware_feature_proto)}, which names no embedding "
                "feature. Give `resolver.tpu_hardware_feature`; it is None until "
                "`resolver.set_tpu_topology` was told of hardware: JAX does not say."
            )
        return features[number]
