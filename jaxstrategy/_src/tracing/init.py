"""Builds mirrored or sharded state, on all devices at once: `build_replicated`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy._src.processes import job
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import (
    WHOLE,
    InnerSpec,
    assembled,
    checked_spec,
    has_inner_axes,
    inner_dimensions,
    inner_spec,
    is_spec,
    sharding_like,
    with_inner,
)
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    Replicas,
    sharded_along,
)
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.constants import constants, fingerprint
from jaxstrategy._src.tracing.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    closed,
    jaxpr_of,
    live_equations,
    origins_of,
    plain,
    read_by,
    variables,
)
from jaxstrategy._src.tracing.partition.partition import inline_calls
from jaxstrategy._src.tracing.traced_step import name_of
from jaxstrategy._src.tracing.translation import needs_mesh, unknown_axis, without_axes
from jaxstrategy._src.values import arrays as _arrays, building, per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.building import shardings_of
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.trees import annotated_leaves, without_eager_sharding


@final
class InnerShardings:
    """The shardings over the devices of a replica of arrays that a function builds."""

    def __init__(
        self, specs: PyTree, args: Sequence[PyTree], replicas: Replicas
    ) -> None:
        self._specs = specs
        self._replicas = replicas
        self._placed = list(_placed(args, replicas))

    @property
    def may_exist(self) -> bool:
        return self._specs is not None or has_inner_axes(self._replicas)

    def shardings(self, types: PyTree) -> list[NamedSharding]:
        """The sharding of each array of the result, replicated over the replicas."""
        return [with_inner(spec, self._replicas) for spec in self._all_specs(types)]

    def typed(self, types: PyTree) -> PyTree:
        """`types` with these shardings."""
        leaves, structure = jax.tree.flatten(types)
        if not self.may_exist:
            return types
        typed = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, self.shardings(types), strict=True)
        ]
        return jax.tree.unflatten(structure, typed)

    def _all_specs(self, types: PyTree) -> Iterator[InnerSpec]:
        specs = self._broadcast_specs(types)
        flags = building.optimizer_leaves(types, per_replica.is_per_replica)
        leaves = annotated_leaves(types)
        for spec, is_optimizer, (path, leaf, annotation) in zip(
            specs, flags, leaves, strict=True
        ):
            where = f"`result{jax.tree_util.keystr(path)}`"
            if spec is not None:
                what = f"The entry of `specs` for {where}"
                yield checked_spec(spec, leaf.shape, self._replicas, what)
            elif annotation is not None and has_inner_axes(self._replicas):
                yield self._annotated(annotation, leaf, is_optimizer, where)
            else:
                yield self._as_argument(path, leaf)

    def _broadcast_specs(self, types: PyTree) -> list[InnerSpec | None]:
        """The entry of `specs` for each array of the result."""
        leaves = jax.tree.leaves(types)
        if self._specs is None:
            return [None] * len(leaves)
        try:
            specs = jax.tree.broadcast(self._specs, types, is_leaf=_is_spec_or_none)
        except ValueError as error:
            raise ValueError(
                f"`specs` does not fit what the function builds: {error}\nGive a "
                "spec (`jax.P`) for all of it, or a pytree of them that has its "
                "structure, or the upper part of that; None leaves an array, or a part "
                "of the pytree, as it is annotated."
            ) from error
        return jax.tree.leaves(specs, is_leaf=_is_spec_or_none)

    def _annotated(
        self, annotation: object, leaf: Leaf, is_optimizer: bool, where: str
    ) -> InnerSpec:
        try:
            what = f"The annotation of {where}"
            return checked_spec(annotation, leaf.shape, self._replicas, what)
        except ValueError:
            # A factored moment has the annotation of its parameter, but not its shape.
            if not is_optimizer:
                raise
            return WHOLE

    def _as_argument(self, path: KeyPath, leaf: Leaf) -> InnerSpec:
        """The spec of an argument with the same shape and the end of the path."""
        for shape, end, spec in self._placed:
            has_end = len(path) >= len(end) and path[len(path) - len(end) :] == end
            if leaf.shape == shape and has_end:
                return spec
        return WHOLE


def _is_spec_or_none(node: object) -> bool:
    return node is None or is_spec(node)


def _placed(
    args: Sequence[PyTree], replicas: Replicas
) -> Iterator[tuple[tuple[int, ...], KeyPath, InnerSpec]]:
    """The shapes, paths and specs of arguments that are sharded over inner axes."""
    if not has_inner_axes(replicas):
        return
    for arg in args:
        for path, leaf in jax.tree.leaves_with_path(arg):
            if not _arrays.is_placed(leaf):
                continue
            if any(spec := inner_spec(leaf, replicas)):
                yield leaf.shape, path, spec


# Keys and whole numbers up to this size are computed once for all results, so that
# layers of one kind are one program.
_SHARED_BYTES = 65536

Known: TypeAlias = dict[Var, jax.Array]
"""Values of variables, on all replicas."""


def build_sharded(
    build: Callable[..., tuple[PyTree, list[jax.Array]]],
    arrays: Sequence[jax.Array | np.ndarray | np.generic],
    replicas: Replicas,
    inner: InnerShardings,
    name: str,
) -> tuple[PyTree, list[jax.Array]]:
    """`build(*arrays)`, with each array sharded as `replicas` keep their state."""
    inputs = [
        building.replicate_leaf(array, _input_sharding(array, replicas))
        for array in arrays
    ]
    traced, returned = jax.make_jaxpr(build, return_shape=True)(*inputs)
    state, versions = returned
    typed = inner.typed(state)
    shardings = [sharding for _, _, sharding in shardings_of(typed, replicas)]
    shardings += [replicas.sharding(STACKED)] * len(versions)
    # A jitted function that builds the whole state is no single value to compute.
    jaxpr = plain(traced)
    jaxpr = jaxpr_of([*jaxpr.invars, *jaxpr.constvars], jaxpr.eqns, jaxpr.outvars)
    inlined = inline_calls(jaxpr, lambda eqn: len(eqn.outvars) == 1)
    consts: list[jax.Array] = [*traced.consts, *inlined.constants]
    is_same = _is_same_in_all_processes(name, traced)
    if is_same:
        consts = [mesh.place(x, _input_sharding(x, replicas)) for x in consts]
    whole = replicas.sharding(REPLICATED) if is_same else None
    programs = _Programs(inlined.jaxpr, [*inputs, *consts], shardings, whole)
    arrays = programs.results() if is_same else programs.of_first_process()
    return jax.tree.unflatten(jax.tree.structure(returned), arrays)


def _input_sharding(
    array: jax.Array | np.ndarray | np.generic, replicas: Replicas
) -> NamedSharding:
    """The sharding of an argument or a constant, which may be state."""
    assert replicas.state_sharding is not None, "the caller has checked"
    # The user's choice is by path, which it lacks.
    sharding = dataclasses.replace(replicas.state_sharding, dimension=None)
    taken = inner_dimensions(array, replicas)
    division = sharding.division("", array, replicas.parts, taken)
    return sharding_like(array, replicas, sharded_along(division.dimension))


def _is_same_in_all_processes(name: str, traced: ClosedJaxpr) -> bool:
    """Whether all processes have the same program, with the same constants."""
    processes = job.current()
    if processes is None or processes.count == 1:
        return True
    prints = fingerprint(name, traced)["prints"]
    replies = processes.operations.agree(f"build state by `{name}`", prints)
    return all(each == replies[0] for each in replies)


@final
class _Programs:
    """Builds one state by several programs, so that none needs much memory."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[jax.Array],
        shardings: Sequence[NamedSharding],
        whole: NamedSharding | None,
    ) -> None:
        self._jaxpr = jaxpr
        self._shardings = shardings
        self._whole = whole
        self._known: Known = dict(zip(jaxpr.invars, inputs, strict=True))
        self._programs: dict[Hashable, Callable[..., list[jax.Array]]] = {}

    def results(self) -> list[jax.Array]:
        """The results, in order.

        What rounding could change is computed whole, one array after the other: in the
        program of a shard, the end of a row is computed by other instructions (`log1p`
        and `erf_inv` on CPU, JAX 0.10 and 0.12).
        """
        jaxpr, outvars = self._jaxpr, self._jaxpr.outvars
        origins = origins_of(jaxpr.eqns)
        whole = [i for i, x in enumerate(self._shardings) if x.is_fully_replicated]
        filled = (i for i, atom in enumerate(outvars) if _is_filled(atom, origins))
        exact = {*filled, *(i for i in whole if not _is_inexact(outvars[i]))}
        shared = _shared(jaxpr)
        shardings = [self._shardings[number] for number in exact]
        shardings += [self._whole] * len(shared)
        # With all equations, as some have effects, such as prints.
        atoms = [*(outvars[number] for number in exact), *shared]
        program = _function(jaxpr_of(list(self._known), jaxpr.eqns, atoms))
        arrays = jax.jit(program, out_shardings=shardings)(*self._known.values())
        found = dict(zip(exact, arrays, strict=False))
        self._known |= dict(zip(shared, arrays[len(exact) :], strict=True))
        # One program for all others that are replicated anyway.
        whole = [number for number in whole if number not in found]
        computed = self._computed([outvars[number] for number in whole])
        found |= dict(zip(whole, computed, strict=True))
        for number, sharding in enumerate(self._shardings):
            if number not in found:
                (value,) = self._computed([outvars[number]])
                # Sharded before the next is computed.
                found[number] = jax.block_until_ready(mesh.place(value, sharding))
        return [found[number] for number in range(len(outvars))]

    def of_first_process(self) -> list[jax.Array]:
        """The results of the first process, sent to the others one after the other."""
        self._known = {var: _local(value) for var, value in self._known.items()}
        results: list[jax.Array] = []
        for atom, sharding in zip(self._jaxpr.outvars, self._shardings, strict=True):
            (value,) = self._computed([atom])
            results.append(mesh.broadcast(value, sharding))
        return results

    def _computed(self, atoms: Sequence[Atom]) -> list[jax.Array]:
        """Some results, replicated, from replicated inputs."""

        def unknown(atoms: Iterable[Atom]) -> Iterable[Var]:
            return (var for var in variables(atoms) if var not in self._known)

        if not atoms:
            return []
        eqns = live_equations(
            self._jaxpr.eqns, unknown(atoms), lambda eqn: unknown(eqn.invars)
        )
        read = read_by(eqns).union(variables(atoms))
        inputs = [var for var in self._known if var in read]
        jaxpr = jaxpr_of(inputs, eqns, atoms)
        key = _cache_key(jaxpr)
        program = self._programs.get(key)
        if program is None:
            program = jax.jit(_function(jaxpr), out_shardings=self._whole)
            self._programs[key] = program
        return program(*(self._replicated(self._known[var]) for var in inputs))

    def _replicated(self, value: jax.Array) -> jax.Array:
        is_sharded = isinstance(value, jax.Array) and mesh.is_divided(value)
        return mesh.place(value, self._whole) if self._whole and is_sharded else value


def _is_filled(atom: Atom, origins: Mapping[Var, Equation]) -> bool:
    """Whether all elements are one constant, as in moments: made in parts."""
    if isinstance(atom, Literal) or (eqn := origins.get(atom)) is None:
        return False
    is_broadcast = eqn.primitive.name == "broadcast_in_dim"
    return is_broadcast and isinstance(eqn.invars[0], Literal)


def _shared(jaxpr: Jaxpr) -> list[Var]:
    """Keys and whole numbers, few of them, from which other values are computed."""
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars if _is_shared(var)}
    readers = (e for e in jaxpr.eqns if not made.issuperset(e.outvars))
    read = dict.fromkeys(variables(atom for eqn in readers for atom in eqn.invars))
    return [var for var in read if var in made]


def _is_shared(var: Var) -> bool:
    size = math.prod(var.aval.shape) * var.aval.dtype.itemsize
    return size <= _SHARED_BYTES and not _is_inexact(var)


def _is_inexact(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _cache_key(jaxpr: Jaxpr) -> Hashable:
    """Equal for programs that compute the same, such as layers of one kind."""
    if jaxpr.effects or any(_has_callables(eqn) for eqn in all_eqns(jaxpr)):
        return jaxpr  # equal to no other
    # `str` abbreviates arrays.
    return str(jaxpr), tuple(_bits(constant.value) for constant in constants(jaxpr))


# They only call a function.
_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call"))


def _has_callables(eqn: Equation) -> bool:
    """Whether an equation has parameters that `str` does not show, as callbacks."""
    if eqn.primitive.name in _CALLS:  # these are rules for derivatives
        return False
    return any(callable(param) for param in eqn.params.values())


def _bits(constant: jax.Array | np.ndarray | np.generic) -> Hashable:
    """Identifies an array by its `id`, a number by its value."""
    return id(constant) if np.ndim(constant) else np.asarray(constant).tobytes()


def _local(value: jax.Array) -> jax.Array:
    """A replicated value on one device of this process."""
    if not isinstance(value, jax.Array):
        return value
    if not value.is_fully_replicated:
        value = mesh.place(value, mesh.replicated_like(value.sharding))
    return value.addressable_data(0)


def _function(jaxpr: Jaxpr) -> Callable[..., list[jax.Array]]:
    return core.jaxpr_as_fun(closed(jaxpr))


Build: TypeAlias = Callable[..., tuple[PyTree, list[jax.Array]]]
"""arrays -> state, and arrays `[replica, ...]` for each `PerReplica` in it."""


def build_replicated(
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    replicas: Replicas,
    specs: PyTree = None,
) -> PyTree:
    """`fn(*args)`, compiled, with its arrays placed as `replicas` keep their state."""
    if not callable(fn):
        raise TypeError(
            f"`init` was given {fn!r}, which cannot be called. Give the function that "
            "builds the state and then its arguments: `strategy.init(model.init, key)`."
        )
    leaves, treedef = jax.tree.flatten(tuple(args), is_leaf=per_replica.is_per_replica)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise TypeError(
            "`init` was given a PerReplica, but it builds one state that is the same "
            "on all replicas. Give it plain arrays."
        )
    traced = [index for index, leaf in enumerate(leaves) if _arrays.is_array(leaf)]

    def build(*tracers: jax.Array) -> PyTree:
        new = dict(zip(traced, tracers, strict=True))
        inputs = [new.get(index, leaf) for index, leaf in enumerate(leaves)]
        returned = _called(fn, jax.tree.unflatten(treedef, inputs), replicas)
        returned, stacked = _without_versions(returned, replicas)
        arrays, results = _signature.flatten_results(returned, leaves, name_of(fn))
        return results.rebuild(arrays), stacked

    inputs = [leaves[index] for index in traced]
    inner = InnerShardings(specs, args, replicas)
    is_traced = _arrays.is_traced() or any(isinstance(x, Tracer) for x in inputs)
    if replicas.state_sharding is not None and not is_traced:
        return _with_versions(
            *build_sharded(build, inputs, replicas, inner, name_of(fn))
        )
    arrays = building.replicate(inputs, replicas)
    built, stacked = _built(build, arrays, inner, replicas)
    if not replicas.are_all_local:  # what `fn` captures may differ
        built = jax.tree.map(lambda leaf: _of_first_process(leaf, replicas), built)
    elif replicas.state_sharding is not None:
        built = building.replicate(built, replicas)
    return _with_versions(built, stacked)


def _called(
    fn: Callable[..., PyTree], args: Sequence[PyTree], replicas: Replicas
) -> PyTree:
    """Calls `fn`, if need be where a mesh binds the inner axes."""
    with without_eager_sharding():
        try:
            # With a mesh, Flax raises for annotations of its attention layers, which it
            # builds as matrices first (0.12).
            return fn(*args)
        except RuntimeError as error:
            if not needs_mesh(error):
                raise
            if not has_inner_axes(replicas):
                raise without_axes(error, name_of(fn)) from error
        try:
            with jax.sharding.use_abstract_mesh(replicas.mesh.abstract_mesh):
                return fn(*args)
        except ValueError as error:
            if (new := unknown_axis(error, name_of(fn), replicas)) is None:
                raise
            raise new from error


def _built(
    build: Build, arrays: Sequence[Leaf], inner: InnerShardings, replicas: Replicas
) -> tuple[PyTree, list[jax.Array]]:
    """`build(*arrays)`, replicated over the replicas."""
    split = replicas.sharding(STACKED)
    if not inner.may_exist:
        whole = replicas.sharding(REPLICATED)
        return jax.jit(build, out_shardings=(whole, split))(*arrays)
    traced, types = jax.make_jaxpr(build, return_shape=True)(*arrays)
    state, versions = types
    shardings = [*inner.shardings(state), *[split] * len(versions)]
    built = jax.jit(core.jaxpr_as_fun(traced), out_shardings=shardings)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(types), built)


def _of_first_process(leaf: jax.Array, replicas: Replicas) -> jax.Array:
    """The array of the first process, sent to all."""
    if leaf.is_fully_replicated:
        return mesh.broadcast(leaf.addressable_data(0), replicas.sharding(REPLICATED))
    assert isinstance(leaf.sharding, NamedSharding), "it is on a mesh"
    # The devices of one replica are of one process.
    return mesh.broadcast(assembled(leaf), leaf.sharding)


@dataclasses.dataclass(frozen=True)
class _Versions:
    """Marks the `n`-th `PerReplica` of the result."""

    n: int


def _without_versions(
    tree: PyTree, replicas: Replicas
) -> tuple[PyTree, list[jax.Array]]:
    """`tree` with marks for the `PerReplica`s that were built, and their arrays."""
    stacked: list[jax.Array] = []

    def marked(path: KeyPath, leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerReplica):
            return leaf
        array = per_replica.contents(leaf)
        if not isinstance(array, Tracer):  # captured
            return leaf
        what = f"result{jax.tree_util.keystr(path)}"
        building.check_stacked(array, replicas.count, what)
        stacked.append(array)
        return _Versions(len(stacked) - 1)

    marks = jax.tree.map_with_path(marked, tree, is_leaf=_signature.is_one_leaf)
    return marks, stacked


def _with_versions(tree: PyTree, stacked: Sequence[jax.Array]) -> PyTree:
    """`tree` with these arrays as `PerReplica`s in place of marks."""

    def unmarked(leaf: Leaf) -> Leaf:
        return PerReplica(stacked[leaf.n]) if isinstance(leaf, _Versions) else leaf

    plain = _signature.unwrap_non_arrays(tree)
    return jax.tree.map(unmarked, plain, is_leaf=per_replica.is_per_replica)
