"""Programs for updates of variables, as parameter servers are sent them."""

import jax
from jax import export


def exported(function, *types, platforms=("cpu",)):
    """`function` of arrays of these shapes and dtypes."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    program = export.export(jax.jit(function), platforms=platforms)(*structs)
    return bytes(program.serialize())
