"""Operations of which nothing else is known than what JAX lowers them to.

A primitive may be lowered to any StableHLO. If all of that is listed here, its results
depend on nothing but its operands. What is not listed may be anything.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import Literal
from jax.sharding import Mesh

from jaxstrategy.replicas._replicas import SAME, Replicas
from jaxstrategy.tracing._jaxpr_types import ClosedJaxpr, Equation
from jaxstrategy.tracing._on_own_devices import on_own_devices
from jaxstrategy.tracing.replication._collective_table import COLLECTIVES
from jaxstrategy.tracing.replication._jaxprs import closed


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A description of what an operation is lowered to.

    Attributes:
      is_pure: whether it computes from its operands only, without communication.
      communicates: whether there are collectives in it.
      decides: whether it branches or loops, or may do so.
    """

    is_pure: bool
    communicates: bool
    decides: bool


UNKNOWN = Lowered(is_pure=False, communicates=False, decides=True)


def lowered(eqn: Equation, mesh: Mesh | None) -> Lowered:
    """A description of `eqn` as it is lowered for the devices of `mesh`."""
    if mesh is None:
        return UNKNOWN
    try:
        text = _text(eqn, mesh)
    except Exception:  # anybody's code; what cannot be lowered is refused later
        return UNKNOWN
    return scanned(text)


def _text(eqn: Equation, mesh: Mesh) -> str:
    only = core.jaxpr_as_fun(alone(eqn))
    replicas = Replicas(mesh)
    # Outside `shard_map` JAX knows no axis of the mesh: `unbound axis name`.
    avals = [atom.aval for atom in operands_of(eqn)]
    on_each = on_own_devices(only, replicas, [SAME] * len(avals), SAME)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return jax.jit(on_each).lower(*types).as_text()


def operands_of(eqn: Equation) -> list[Any]:
    """The variables among the operands of `eqn`."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def alone(eqn: Equation) -> ClosedJaxpr:
    """A jaxpr with this one equation, which takes its variables in turn."""
    eqns: Any = [eqn]
    outvars: Any = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    jaxpr = core.Jaxpr(
        constvars=(),
        invars=operands_of(eqn),
        outvars=outvars,
        eqns=eqns,
        effects=eqn.effects,
        debug_info=core.DebugInfo("jit", eqn.primitive.name, None, None),
    )
    return closed(jaxpr)


def scanned(text: str) -> Lowered:
    """A description of a module of StableHLO."""
    operations = {_operation(line) for line in text.splitlines()}
    return Lowered(
        # `custom_call` is among the pure ones, so what it calls must be known, too.
        is_pure=operations <= _PURE and all(map(_LIBRARY.fullmatch, _targets(text))),
        communicates=bool(operations & _COLLECTIVES),
        decides=not operations <= _STRAIGHT,
    )


def _operation(line: str) -> str:
    """The name of the operation on a line; "" where there is only structure."""
    if match := _OPERATION.match(line):
        return match[1]
    # What is read as neither stands for itself: it is in no set, so nothing is proved.
    return "" if _STRUCTURE.fullmatch(line) else line


_OPERATION = re.compile(r'\s*(?:%\w+(?::\d+)?(?:, %\w+)* = )?"?([a-z]\w*(?:\.\w+)+)\b')
_STRUCTURE = re.compile(
    r"\s*(|[})]+( do \{|, \{|.* : .*)?|\^\w+.*:|cond \{|\} do \{|module .*|reducer\(.*"
    r"|(?:%\w+(?::\d+)? = )?call @.*|return.*)"
)


def _targets(text: str) -> set[str]:
    return set(re.findall(r"custom_call @([\w.$]+)", text)) | set(
        re.findall(r'call_target_name = "([^"]*)"', text)
    )


_CONTROL = {"stablehlo.case", "stablehlo.if", "stablehlo.while"}
_COLLECTIVES = {f"stablehlo.{row.lowered}" for row in COLLECTIVES.values()}
_COLLECTIVES |= {"stablehlo.async_start", "stablehlo.async_done"}
_ARITHMETIC = """
    abs add after_all and atan2 batch_norm_grad batch_norm_inference batch_norm_training
    bitcast_convert broadcast broadcast_in_dim cbrt ceil cholesky clamp compare complex
    composite concatenate constant convert convolution cosine count_leading_zeros
    create_token custom_call divide dot dot_general dynamic_broadcast_in_dim
    dynamic_conv dynamic_gather dynamic_iota dynamic_pad dynamic_reshape dynamic_slice
    dynamic_update_slice einsum exponential exponential_minus_one fft floor gather
    get_dimension_size get_tuple_element imag iota is_finite log log_plus_one logistic
    map maximum minimum multiply negate not optimization_barrier or pad popcnt power
    real real_dynamic_slice reduce reduce_precision reduce_window remainder reshape
    return reverse rng_bit_generator round_nearest_afz round_nearest_even rsqrt scatter
    select select_and_scatter set_dimension_size shift_left shift_right_arithmetic
    shift_right_logical sign sine slice sort sqrt subtract tan tanh torch_index_select
    transpose triangular_solve tuple unary_einsum uniform_dequantize uniform_quantize
    xor
"""
_SPECIAL = """
    acos acosh asin asin_acos_kernel asinh atan atanh bessel_i1e broadcast_add
    broadcast_compare broadcast_maximum broadcast_minimum broadcast_multiply
    broadcast_select broadcast_subtract conj constant constant_like cosh digamma erf
    erf_inv erfc is_inf lgamma mulhi next_after polygamma ragged_dot sinh square tan
    top_k zeta
"""
_AROUND = "func.func func.call func.return sdy.mesh sdy.manual_computation sdy.return"
# What is nothing but a sequence of operations, and computes.
_SEQUENCE = (
    {"", *_AROUND.split(), "sdy.sharding_constraint"}
    | {f"stablehlo.{name}" for name in _ARITHMETIC.split()}
    | {f"chlo.{name}" for name in _SPECIAL.split()}
)
_PURE = _SEQUENCE | _CONTROL
_STRAIGHT = _SEQUENCE | _COLLECTIVES
# Functions of libraries that JAX itself calls.
_LIBRARY = re.compile(
    r"lapack_.*|(cu|hip)_(threefry2x32|lu_pivots_to_permutation).*"
    r"|(cu|hip)solver_.*|(cu|hip)blas_.*|mhlo\.topk|ApproxTopK|PartialReduce|Sharding"
)
