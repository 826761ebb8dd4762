"""Objects that a step changes in place: modules, optimizers and metrics of Flax NNX.

This is all that the rest of the package asks about them, the one way into this folder.
A compiled step is a function of arrays. So the arrays of all objects that it is given,
or has captured, are passed to it; objects like them are put together there, the step
works on those, and their new arrays are put into the caller's objects.
"""

from jaxstrategy.tracing.nnx._callers_objects import holders_of as holders_of
from jaxstrategy.tracing.nnx._object_calls import BoundCall as BoundCall
from jaxstrategy.tracing.nnx._object_calls import ObjectCall as ObjectCall
from jaxstrategy.tracing.nnx._object_calls import ObjectCalls as ObjectCalls
from jaxstrategy.tracing.nnx._object_calls import as_arrays as as_arrays
from jaxstrategy.tracing.nnx._object_calls import call_of as call_of
from jaxstrategy.tracing.nnx._object_calls import came_from_step as came_from_step
from jaxstrategy.tracing.nnx._object_calls import captured_by as captured_by
from jaxstrategy.tracing.nnx._object_calls import options_of as options_of
from jaxstrategy.tracing.nnx._object_calls import refused as refused
from jaxstrategy.tracing.nnx._object_calls import require_objects as require_objects
from jaxstrategy.tracing.nnx._object_calls import step_of_arrays as step_of_arrays
from jaxstrategy.tracing.nnx._object_calls import takes_arrays as takes_arrays
from jaxstrategy.tracing.nnx._object_calls import unchanged as unchanged
from jaxstrategy.tracing.nnx._object_form import AttributeChange as AttributeChange
from jaxstrategy.tracing.nnx._object_form import Parts as Parts
from jaxstrategy.tracing.nnx._object_form import (
    is_changed_in_place as is_changed_in_place,
)
from jaxstrategy.tracing.nnx._object_form import is_parts as is_parts
from jaxstrategy.tracing.nnx._object_form import structure_of as structure_of
