"""Objects that a step changes in place: modules, optimizers and metrics of Flax NNX.

This is all that the rest of the package asks about them, the one way into this folder.
A compiled step is a function of arrays. So the arrays of all objects that it is given,
or has captured, are passed to it; objects like them are put together there, the step
works on those, and their new arrays are put into the caller's objects.
"""

from jaxstrategy.tracing.nnx._bound_call import BoundCall as BoundCall
from jaxstrategy.tracing.nnx._callers_objects import holders_of as holders_of
from jaxstrategy.tracing.nnx._changed_objects import unchanged as unchanged
from jaxstrategy.tracing.nnx._flax_errors import refused as refused
from jaxstrategy.tracing.nnx._object_call import ObjectCall as ObjectCall
from jaxstrategy.tracing.nnx._object_call import as_arrays as as_arrays
from jaxstrategy.tracing.nnx._object_call import call_of as call_of
from jaxstrategy.tracing.nnx._object_call import captured_by as captured_by
from jaxstrategy.tracing.nnx._object_call import options_of as options_of
from jaxstrategy.tracing.nnx._object_call import require_objects as require_objects
from jaxstrategy.tracing.nnx._object_calls import ObjectCalls as ObjectCalls
from jaxstrategy.tracing.nnx._object_kinds import (
    is_changed_in_place as is_changed_in_place,
)
from jaxstrategy.tracing.nnx._object_kinds import structure_of as structure_of
from jaxstrategy.tracing.nnx._object_step import came_from_step as came_from_step
from jaxstrategy.tracing.nnx._object_step import step_of_arrays as step_of_arrays
from jaxstrategy.tracing.nnx._object_step import takes_arrays as takes_arrays
from jaxstrategy.tracing.nnx._parts import AttributeChange as AttributeChange
from jaxstrategy.tracing.nnx._parts import Parts as Parts
from jaxstrategy.tracing.nnx._parts import is_parts as is_parts
