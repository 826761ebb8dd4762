"""Objects that a step changes in place: modules, optimizers and metrics of Flax NNX.

This is all that the rest of the package asks about them, the one way into this folder.
A compiled step is a function of arrays. So the arrays of all objects that it is given,
or has captured, are passed to it; objects like them are put together there, the step
works on those, and their new arrays are put into the caller's objects.
"""

from jaxstrategy._src.tracing.nnx.callers_objects import holders_of as holders_of
from jaxstrategy._src.tracing.nnx.object_calls import (
    BoundCall as BoundCall,
    ObjectCall as ObjectCall,
    ObjectCalls as ObjectCalls,
    as_arrays as as_arrays,
    call_of as call_of,
    came_from_step as came_from_step,
    captured_by as captured_by,
    options_of as options_of,
    refused as refused,
    require_objects as require_objects,
    step_of_arrays as step_of_arrays,
    takes_arrays as takes_arrays,
    unchanged as unchanged,
)
from jaxstrategy._src.tracing.nnx.object_form import (
    AttributeChange as AttributeChange,
    Parts as Parts,
    is_changed_in_place as is_changed_in_place,
    is_parts as is_parts,
    structure_of as structure_of,
)
