"""Datasets of several processes: what each replica was given, by step."""

import json

import jax
import numpy as np

import jaxstrategy as js
from workers import LAYOUT


def main():
    s = js.MultiWorkerMirroredStrategy(**LAYOUT)
    own, count = jax.process_index(), jax.process_count()
    n = s.num_replicas_in_sync
    told = {}

    def rows(batches):
        """Each batch's real rows by replica, of this process."""
        return [
            [np.asarray(part).tolist() for part in s.experimental_local_results(batch)]
            for batch in batches
        ]

    def sums(batches):
        """Of the real rows of all processes, by step."""

        @s.run
        def step(batch):
            found = js.masked_sum(batch), js.batch_mask(batch).sum()
            return js.get_replica_context().all_reduce("sum", found)

        return [[float(total), int(real)] for total, real in map(step, batches)]

    def distributed(*arguments, **options):
        return s.experimental_distribute_dataset(js.batches(*arguments, **options))

    told["rows"] = rows(distributed(np.arange(22.0), 8))
    told["sums"] = sums(distributed(np.arange(22.0), 8))
    told["dropped"] = rows(
        s.experimental_distribute_dataset(
            js.batches(np.arange(22.0), 8), js.InputOptions(remainder="drop")
        )
    )
    told["shuffled"] = rows(distributed(np.arange(16.0), 8, shuffle=5, epochs=2))

    def uneven(context):
        assert context.num_input_pipelines == count
        assert context.input_pipeline_id == own
        size = context.get_per_replica_batch_size(2 * n)
        return js.batches(100.0 * own + np.arange(8.0 + 5 * own), size)

    told["uneven"] = rows(s.distribute_datasets_from_function(uneven))
    told["uneven sums"] = sums(s.distribute_datasets_from_function(uneven))

    # Both go on in the middle: what all read together, and what each reads alone.
    for name, dataset in {
        "resumed": distributed(np.arange(32.0), 8, shuffle=1, epochs=2),
        "resumed alone": s.distribute_datasets_from_function(uneven),
    }.items():
        with iter(dataset) as iterator:
            next(iterator)
            state = json.loads(json.dumps(iterator.get_state()))
            whole = rows(iterator)
        with iter(dataset) as iterator:
            iterator.set_state(state)
            told[name] = [whole, rows(iterator)]

    with iter(distributed(np.arange(22.0), 8)) as iterator:
        spec = iterator.element_spec
        told["spec"] = str(spec)
        optional = iterator.get_next_as_optional()
        told["optional"] = [optional.has_value(), rows([optional.get_value()])]
    for _ in zip(range(2), distributed(np.arange(64.0), 8), strict=False):
        pass  # a pass that is given up on all processes
    told["after"] = sums(distributed(np.arange(8.0), 8))

    other = js.batches(np.arange(8.0 * (1 + own)), 8 * (1 + own))
    told["sizes"] = rows(s.distribute_datasets_from_function(lambda _: other))
    print("told", json.dumps(told))
