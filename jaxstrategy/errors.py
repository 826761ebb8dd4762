"""All errors and warnings of the package that a program may catch or filter.

Those that training loops usually catch are names of `jaxstrategy` too.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.errors import (
        CancelledError as CancelledError,
        ClosureAbortedError as ClosureAbortedError,
        ClosureInputError as ClosureInputError,
        ClusterError as ClusterError,
        CompiledStepError as CompiledStepError,
        ContextError as ContextError,
        DivergentCollectiveError as DivergentCollectiveError,
        DonatedValueError as DonatedValueError,
        DoubleReductionWarning as DoubleReductionWarning,
        LateReplicaWarning as LateReplicaWarning,
        LeakedTracerError as LeakedTracerError,
        MissingExtraError as MissingExtraError,
        NonFiniteError as NonFiniteError,
        NotMirroredError as NotMirroredError,
        NotMirroredVariableError as NotMirroredVariableError,
        NotMirroredWarning as NotMirroredWarning,
        ObjectError as ObjectError,
        OutOfRangeError as OutOfRangeError,
        OutOfSyncError as OutOfSyncError,
        PaddedRowsWarning as PaddedRowsWarning,
        ParameterServerLost as ParameterServerLost,
        PlacementError as PlacementError,
        RecompilationWarning as RecompilationWarning,
        SimulationError as SimulationError,
        TracedValueError as TracedValueError,
        WholeTableWarning as WholeTableWarning,
        WorkerLost as WorkerLost,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
