"""A dataset of Grain on four replicas."""

import grain
import numpy as np

import jaxstrategy as js

strategy = js.MirroredStrategy(js.simulate(4))
dataset = grain.MapDataset.source(np.arange(40.0, dtype=np.float32)).batch(8)
total = 0.0
for batch in strategy.experimental_distribute_dataset(dataset):
    total += float(strategy.reduce("sum", strategy.run(js.masked_sum, (batch,))))
assert total == 780.0, total
