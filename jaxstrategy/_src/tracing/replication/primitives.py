"""Which primitives are pure: by name, by declaration, by their lowering."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend import core
from jax.extend.core import Literal, Primitive, primitives
from jax.sharding import Mesh

from jaxstrategy._src.replicas.replicas import REPLICATED, Replicas
from jaxstrategy._src.tracing.jaxprs import COLLECTIVES, ClosedJaxpr, Equation, closed
from jaxstrategy._src.tracing.numbered_prints import on_own_devices

# Those of `jax.extend.core.primitives`: another of that name is not JAX's own.
_REGISTERED = """
    abs acos acosh add add_any after_all and approx_top_k argmax argmin asin asinh atan
    atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type broadcast_in_dim cbrt ceil
    cholesky clamp clz complex conj conv_general_dilated convert_element_type copy cos
    cosh create_token cumlogsumexp cummax cummin cumprod cumsum digamma dot_general
    dynamic_slice dynamic_update_slice eig eigh erf erf_inv erfc exp exp2 expm1 fft
    floor gather hessenberg householder_product igamma igamma_grad_a igammac imag
    integer_pow iota lgamma log log1p log2 logistic lu max min name neg nextafter not
    one_minus_square or pad polygamma polynomial population_count pow qr random_bits
    random_fold_in random_gamma random_seed random_split real reduce reduce_and
    reduce_or reduce_precision reduce_prod
    reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
    regularized_incomplete_beta rem rev rng_bit_generator round rsqrt scatter
    scatter-add scatter-max scatter-min scatter-mul schur select_and_gather_add
    select_and_scatter select_and_scatter_add sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sort sqrt square
    squeeze stop_gradient sub svd tan tanh threefry2x32 top_k transpose
    triangular_solve tridiagonal tridiagonal_solve xor zeta
"""
_OTHERS = """
    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
    bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
    bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense broadcast_to
    cholesky_update coo_fromdense coo_matmat coo_matvec coo_todense create_linear
    csr_fromdense csr_matmat csr_matvec csr_todense dce_sink debug_callback debug_print
    dim_as_value dimension_size from_edtype geqp3 geqrf inspect_sharding iota_2x32_shape
    layout_constraint lu_pivots_to_permutation mulhi ormqr philox2x32 philox4x32 pin
    platform_index ragged_dot_general random_clone random_unwrap random_wrap
    reduced_vary_cast relayout reshard scaled_dot scatter-sub shape_assertion
    shard_alike split stack symmetric_product threefry4x32 tie tile to_edtype todense
    unpin unstack with_memory_space_constraint xla_metadata_value zeros_like
"""
PURE = frozenset(_REGISTERED.split()) | frozenset(_OTHERS.split())

DECLARED: set[Primitive] = set()
# A jitted function keeps its name under differentiation and vmap.
_MARK = " (declared pure)"

Fn = TypeVar("Fn", bound=Callable[..., Any])


# A primitive that is not listed may depend on its device, call a host, draw numbers.
def declare_pure(operation: Any) -> Any:
    """Declares that an operation gives every replica the same for the same operands.

    Of a primitive that JAX does not know, of callbacks, and of kernels written in
    Pallas, no proof is possible: what they return may differ between replicas. Who
    knows better may say so. A declaration that is wrong makes results plain arrays
    whose copies differ.

    Args:
      operation: a `jax.extend.core.Primitive`; or a function of arrays. Only what this
        function is made of, and what is made of its derivatives, is meant.

    Returns:
      The primitive itself; or the function to call instead, so that this serves as a
      decorator, also above a `custom_vjp` function.

    Raises:
      TypeError: it is neither a primitive nor callable.
      ValueError: it is a primitive of JAX, whose behaviour is known.

    >>> import numpy as np
    >>> import jaxstrategy as js
    >>> @js.experimental.declare_pure
    ... def looked_up(x):
    ...     return jax.pure_callback(np.sin, x, x, vmap_method="sequential")
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.run(looked_up, (np.zeros(2, np.float32),))
    Array([0., 0.], dtype=float32)
    """
    if isinstance(operation, Primitive):
        if is_registered(operation):
            raise ValueError(
                f"`{operation.name}` is one of JAX's own primitives, and what it does "
                "is known. Declare a primitive of yours, or a function."
            )
        DECLARED.add(operation)
        return operation
    if not callable(operation):
        raise TypeError(
            f"`declare_pure` was given {operation!r}, a {type(operation).__name__}. "
            "Give it a `jax.extend.core.Primitive`, or a function of arrays."
        )

    @functools.wraps(operation)
    def declared(*args: Any, **kwargs: Any) -> Any:
        return operation(*args, **kwargs)

    declared.__name__ = getattr(operation, "__name__", "function") + _MARK
    return functools.wraps(operation)(jax.jit(declared))


def is_declared_call(eqn: Equation) -> bool:
    """Whether `eqn` calls a function declared pure."""
    return str(eqn.params.get("name", "")).endswith(_MARK)


@functools.cache
def _registered() -> dict[str, Primitive]:
    found = (getattr(primitives, name) for name in dir(primitives))
    return {each.name: each for each in found if isinstance(each, Primitive)}


def is_registered(primitive: Primitive) -> bool:
    """Whether JAX lists this very primitive."""
    return _registered().get(primitive.name) is primitive


def is_named_by_jax(primitive: Primitive) -> bool:
    """Whether a primitive is JAX's own, or no user's with the name of one of JAX's."""
    return is_registered(primitive) or primitive.name not in _registered()


# A primitive is pure if all StableHLO operations to which it is lowered are listed.
@dataclasses.dataclass(frozen=True)
class Lowered:
    """The properties of an operation's StableHLO."""

    is_pure: bool
    communicates: bool
    decides: bool  # has branches or loops


UNKNOWN = Lowered(is_pure=False, communicates=False, decides=True)


def lowered(eqn: Equation, mesh: Mesh | None) -> Lowered:
    """Describes `eqn` as it is lowered for the devices of `mesh`."""
    if mesh is None:
        return UNKNOWN
    try:
        text = _text(eqn, mesh)
    except Exception:  # JAX raises later, when it lowers the step
        return UNKNOWN
    return scanned(text)


def _text(eqn: Equation, mesh: Mesh) -> str:
    only = core.jaxpr_as_fun(alone(eqn))
    replicas = Replicas(mesh)
    # Outside `shard_map` JAX knows no axis of the mesh: `unbound axis name`.
    avals = [atom.aval for atom in operands_of(eqn)]
    on_each = on_own_devices(only, replicas, [REPLICATED] * len(avals), REPLICATED)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return jax.jit(on_each).lower(*types).as_text()


def operands_of(eqn: Equation) -> list[Any]:
    """The variables among the operands of `eqn`."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def alone(eqn: Equation) -> ClosedJaxpr:
    """A jaxpr of this one equation, with its variables as inputs."""
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
    """Describes a module of StableHLO."""
    operations = {_operation(line) for line in text.splitlines()}
    return Lowered(
        # `custom_call` counts as pure, so its target must be known.
        is_pure=operations <= _PURE and all(map(_LIBRARY.fullmatch, _targets(text))),
        communicates=bool(operations & _COLLECTIVES),
        decides=not operations <= _STRAIGHT,
    )


def _operation(line: str) -> str:
    """The name of the operation on a line; "" where there is only structure."""
    if match := _OPERATION.match(line):
        return match[1]
    # An unknown line is in no set, so nothing is proved.
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
# Without branches, loops and communication.
_SEQUENCE = (
    {"", *_AROUND.split(), "sdy.sharding_constraint"}
    | {f"stablehlo.{name}" for name in _ARITHMETIC.split()}
    | {f"chlo.{name}" for name in _SPECIAL.split()}
)
_PURE = _SEQUENCE | _CONTROL
_STRAIGHT = _SEQUENCE | _COLLECTIVES
# Library functions that JAX itself calls.
_LIBRARY = re.compile(
    r"lapack_.*|(cu|hip)_(threefry2x32|lu_pivots_to_permutation).*"
    r"|(cu|hip)solver_.*|(cu|hip)blas_.*|mhlo\.topk|ApproxTopK|PartialReduce|Sharding"
)
