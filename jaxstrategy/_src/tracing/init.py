"""State built in mirrored form, on all devices at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import DropVar, Literal
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
    sharding_by,
    sharding_like,
)
from jaxstrategy._src.replicas.mesh import (
    is_key,
)
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    Replicas,
    sharded_along,
)
from jaxstrategy._src.tracing import results as _results
from jaxstrategy._src.tracing.constants import constants, fingerprint
from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    closed,
    inner_jaxprs,
    jaxpr_of,
    plain,
)
from jaxstrategy._src.tracing.traced_step import name_of
from jaxstrategy._src.tracing.translation import needs_mesh, unknown_axis, without_axes
from jaxstrategy._src.values import arrays as _arrays, building, per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.building import shardings_of
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.trees import annotated_leaves, without_eager_sharding


@final
class InnerState:
    """What is known of where the arrays lie that a function builds."""

    def __init__(
        self, specs: PyTree, args: Sequence[PyTree], replicas: Replicas
    ) -> None:
        self._specs = specs
        self._replicas = replicas
        self._placed = list(_placed(args, replicas))

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be divided so, or the user wants it to be."""
        return self._specs is not None or has_inner_axes(self._replicas)

    def shardings(self, types: PyTree) -> list[NamedSharding]:
        """For each array of the result its placement, whole over the replicas."""
        return [sharding_by(spec, self._replicas) for spec in self._all_specs(types)]

    def typed(self, types: PyTree) -> PyTree:
        """`types`, which say how the arrays lie over the devices of a replica."""
        leaves, structure = jax.tree.flatten(types)
        if not self.is_asked:
            return types
        told = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, self.shardings(types), strict=True)
        ]
        return jax.tree.unflatten(structure, told)

    def _all_specs(self, types: PyTree) -> Iterator[InnerSpec]:
        given = self._given(types)
        flags = building.optimizer_leaves(types, per_replica.is_per_replica)
        found = annotated_leaves(types)
        for own, is_optimizer, (path, leaf, said) in zip(
            given, flags, found, strict=True
        ):
            where = f"`result{jax.tree_util.keystr(path)}`"
            if own is not None:
                what = f"The entry of `specs` for {where}"
                yield checked_spec(own, leaf.shape, self._replicas, what)
            elif said is not None and has_inner_axes(self._replicas):
                yield self._annotated(said, leaf, is_optimizer, where)
            else:
                yield self._as_argument(path, leaf)

    def _given(self, types: PyTree) -> list[InnerSpec | None]:
        """For each array of the result what `specs` says of it."""
        leaves = jax.tree.leaves(types)
        if self._specs is None:
            return [None] * len(leaves)
        try:
            found = jax.tree.broadcast(self._specs, types, is_leaf=_is_end)
        except ValueError as error:
            raise ValueError(
                f"`specs` does not fit what the function builds: {error}\nGive a "
                "spec (`jax.P`) for all of it, or a pytree of them that has its "
                "structure, or the upper part of that; None leaves an array, or a part "
                "of the pytree, as it is annotated."
            ) from error
        return jax.tree.leaves(found, is_leaf=_is_end)

    def _annotated(
        self, said: object, leaf: Leaf, is_optimizer: bool, where: str
    ) -> InnerSpec:
        try:
            what = f"The annotation of {where}"
            return checked_spec(said, leaf.shape, self._replicas, what)
        except ValueError:
            # A factored moment has the annotation of its parameter, but not its shape.
            if not is_optimizer:
                raise
            return WHOLE

    def _as_argument(self, path: KeyPath, leaf: Leaf) -> InnerSpec:
        for shape, end, spec in self._placed:
            is_alike = leaf.shape == shape and len(path) >= len(end)
            if is_alike and path[len(path) - len(end) :] == end:
                return spec
        return WHOLE


def _is_end(node: object) -> bool:
    return node is None or is_spec(node)


def _placed(
    args: Sequence[PyTree], replicas: Replicas
) -> Iterator[tuple[tuple[int, ...], KeyPath, InnerSpec]]:
    """The shapes, paths and divisions of arguments that lie over inner axes."""
    if not has_inner_axes(replicas):
        return
    for arg in args:
        for path, leaf in jax.tree.leaves_with_path(arg):
            if not _arrays.is_placed(leaf):
                continue
            if any(spec := inner_spec(leaf, replicas)):
                yield leaf.shape, path, spec


# They move elements that are there.
_MOVE = frozenset(
    """
    bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p expand_dims
    iota name reshape select_n slice split squeeze stop_gradient transpose unstack
    """.split()
)
# Of whole numbers they are exact. Of others they are not: what is left at the end of a
# row is computed by other instructions than whole vectors are, and a part has another
# end (`log1p` and `erf_inv` on CPU, JAX 0.10 and 0.12); where XLA joins parts, it adds
# zeros to what other devices have, and -0.0 becomes 0.0.
_COMPUTE = frozenset(
    """
    add and clamp concatenate dynamic_slice eq gather ge gt le lt max min mul ne neg
    not or pad rev shift_left shift_right_arithmetic shift_right_logical stack sub
    threefry2x32 xor
    """.split()
)
_DRAW = frozenset(
    """
    random_bits random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap
    """.split()
)
# They compute what the function does that they hold.
CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call"))


def exact_values(jaxpr: Jaxpr) -> set[Var]:
    """The variables of `jaxpr` that are exact however devices divide them."""
    given = [*jaxpr.constvars, *jaxpr.invars]
    return _exact(jaxpr, given)


def _exact(jaxpr: Jaxpr, exact_inputs: Sequence[Var]) -> set[Var]:
    exact = set(exact_inputs)
    for eqn in jaxpr.eqns:
        found = _results_of(eqn, [is_exact(atom, exact) for atom in eqn.invars])
        made = zip(eqn.outvars, found, strict=True)
        exact.update(var for var, ok in made if ok)
    return exact


def is_exact(atom: Atom, exact: set[Var]) -> bool:
    """Whether `atom` is one of `exact`, or a constant of the program."""
    return isinstance(atom, Literal) or atom in exact


def _results_of(eqn: Equation, given: Sequence[bool]) -> list[bool]:
    if eqn.primitive.name in CALLS:
        inner = next(inner_jaxprs(eqn.params))
        own = zip(inner.invars, given, strict=True)
        exact = _exact(inner, [*inner.constvars, *(var for var, ok in own if ok)])
        return [is_exact(atom, exact) for atom in inner.outvars]
    ok = all(given) and not eqn.effects and _is_exact_operation(eqn)
    return [ok] * len(eqn.outvars)


def _is_exact_operation(eqn: Equation) -> bool:
    name, atoms = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
    if name in _COMPUTE:
        return not any(jnp.issubdtype(each.aval.dtype, jnp.inexact) for each in atoms)
    if name in _DRAW:
        # Keys of `rbg` draw what the device's generator gives, part by part.
        keys = [atom.aval.dtype for atom in atoms if is_key(atom.aval.dtype)]
        return all("fry" in str(dtype) for dtype in keys)
    return name in _MOVE


# Of what is exact in parts, such as a random key, smaller ones are computed for all
# results at once. Larger ones are computed again for each, so that they need not stay.
_SHARED_BYTES = 65536

Known: TypeAlias = dict[Var, jax.Array]
"""Values of variables, on all replicas."""


def build_divided(
    build: Callable[..., tuple[PyTree, list[jax.Array]]],
    arrays: Sequence[jax.Array | np.ndarray | np.generic],
    replicas: Replicas,
    inner: InnerState,
    name: str,
) -> tuple[PyTree, list[jax.Array]]:
    """`build(*arrays)`, with each array of it placed as `replicas` keep their state."""
    given = [
        building.replicate_leaf(array, _place_of_input(array, replicas))
        for array in arrays
    ]
    traced, returned = jax.make_jaxpr(build, return_shape=True)(*given)
    state, versions = returned
    wanted = [sharding for _, _, sharding in shardings_of(inner.typed(state), replicas)]
    wanted += [replicas.sharding(STACKED)] * len(versions)
    captured: list[jax.Array] = list(traced.consts)
    is_same = _is_same_everywhere(name, traced)
    if is_same:
        captured = [
            mesh.place(value, _place_of_input(value, replicas)) for value in captured
        ]
    whole = replicas.sharding(REPLICATED) if is_same else None
    programs = _Programs(plain(traced), [*captured, *given], wanted, whole)
    found = programs.results() if is_same else programs.of_first_process()
    return jax.tree.unflatten(jax.tree.structure(returned), found)


def _place_of_input(
    array: jax.Array | np.ndarray | np.generic, replicas: Replicas
) -> NamedSharding:
    """The placement of an argument or a constant, which may be a whole state."""
    assert replicas.state_sharding is not None, "the caller has looked"
    # It has no path of which the user's choice could tell.
    sharding = dataclasses.replace(replicas.state_sharding, dimension=None)
    taken = inner_dimensions(array, replicas)
    division = sharding.division("", array, replicas.parts, taken)
    return sharding_like(array, replicas, sharded_along(division.dimension))


def _is_same_everywhere(name: str, traced: ClosedJaxpr) -> bool:
    """Whether all processes have made the same program, with the same constants."""
    processes = job.current()
    if processes is None or processes.count == 1:
        return True
    prints = fingerprint(name, traced)["prints"]
    replies = processes.operations.agree(f"build state by `{name}`", prints)
    return all(each == replies[0] for each in replies)


@final
class _Programs:
    """The programs that build one state."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[jax.Array],
        wanted: Sequence[NamedSharding],
        whole: NamedSharding | None,
    ) -> None:
        self._jaxpr = jaxpr
        self._wanted = wanted
        self._whole = whole
        given = [*jaxpr.constvars, *jaxpr.invars]
        self._known: Known = dict(zip(given, inputs, strict=True))
        self._programs: dict[Hashable, Callable[..., list[jax.Array]]] = {}

    def results(self) -> list[jax.Array]:
        """The results, in order."""
        exact = exact_values(self._jaxpr)
        outvars = self._jaxpr.outvars
        found = self._exact_results(exact)
        # Of what is whole anyway, one program makes all.
        small = [
            number
            for number, sharding in enumerate(self._wanted)
            if number not in found and sharding.is_fully_replicated
        ]
        made = self._made([outvars[number] for number in small])
        found |= dict(zip(small, made, strict=True))
        for number, sharding in enumerate(self._wanted):
            if number not in found:
                (value,) = self._made([outvars[number]])
                moved = mesh.place(value, sharding)
                found[number] = jax.block_until_ready(moved)  # before the next is made
        return [found[number] for number in range(len(outvars))]

    def of_first_process(self) -> list[jax.Array]:
        """What the first process builds, sent to the others, one after the other."""
        self._known = {var: _here(value) for var, value in self._known.items()}
        found: list[jax.Array] = []
        for atom, sharding in zip(self._jaxpr.outvars, self._wanted, strict=True):
            (value,) = self._made([atom])
            found.append(mesh.broadcast(value, sharding))
        return found

    def _exact_results(self, exact: set[Var]) -> dict[int, jax.Array]:
        """The results that are exact in parts, by number; and what others share."""
        outvars = self._jaxpr.outvars
        numbers = [i for i, atom in enumerate(outvars) if is_exact(atom, exact)]
        shared = _shared(self._jaxpr, exact)
        atoms = [*(outvars[number] for number in numbers), *shared]
        where = [self._wanted[number] for number in numbers]
        inputs = list(self._known)
        # With all equations, for what they do besides: a line that is printed.
        program = _function(jaxpr_of(inputs, self._jaxpr.eqns, atoms))
        jitted = jax.jit(program, out_shardings=where + [self._whole] * len(shared))
        made = jitted(*self._known.values())
        self._known |= dict(zip(shared, made[len(numbers) :], strict=True))
        return dict(zip(numbers, made, strict=False))

    def _made(self, atoms: Sequence[Atom]) -> list[jax.Array]:
        """Some results, whole, of arguments that are whole."""
        if not atoms:
            return []
        inputs, eqns = self._needed(atoms)
        jaxpr = jaxpr_of(inputs, eqns, atoms)
        key = _likeness(jaxpr)
        program = self._programs.get(key)
        if program is None:
            program = jax.jit(_function(jaxpr), out_shardings=self._whole)
            self._programs[key] = program
        return program(*(self._as_whole(self._known[var]) for var in inputs))

    def _as_whole(self, value: jax.Array) -> jax.Array:
        is_divided = isinstance(value, jax.Array) and mesh.is_divided(value)
        return mesh.place(value, self._whole) if self._whole and is_divided else value

    def _needed(self, atoms: Iterable[Atom]) -> tuple[list[Var], list[Equation]]:
        """The known variables and the equations that some results need, in order."""
        needed = {atom for atom in atoms if not isinstance(atom, Literal)}
        found: list[Equation] = []
        for eqn in reversed(self._jaxpr.eqns):
            made = [var for var in eqn.outvars if not isinstance(var, DropVar)]
            if not any(var in needed and var not in self._known for var in made):
                continue
            found.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        return [var for var in self._known if var in needed], found[::-1]


def _shared(jaxpr: Jaxpr, exact: set[Var]) -> list[Var]:
    """The small exact values that others are made of, which all of those share."""
    found: dict[Var, None] = {}
    inputs = {*jaxpr.constvars, *jaxpr.invars}
    for eqn in jaxpr.eqns:
        if not all(is_exact(var, exact) for var in eqn.outvars):
            found |= {
                atom: None
                for atom in eqn.invars
                if not isinstance(atom, Literal)
                and atom in exact
                and atom not in inputs
                and _bytes(atom) <= _SHARED_BYTES
            }
    return list(found)


def _likeness(jaxpr: Jaxpr) -> Hashable:
    """Equal for programs that do the same: layers of one kind are made by one."""
    if jaxpr.effects or any(_hides_something(eqn) for eqn in all_eqns(jaxpr)):
        return jaxpr  # equal to no other
    # JAX prints arrays in short.
    return str(jaxpr), tuple(_bits(constant.value) for constant in constants(jaxpr))


def _hides_something(eqn: Equation) -> bool:
    """Whether an equation may do something that it is printed without: a callback."""
    if eqn.primitive.name in CALLS:  # which know how to differentiate themselves
        return False
    return any(callable(param) for param in eqn.params.values())


def _bits(constant: jax.Array | np.ndarray | np.generic) -> Hashable:
    """Equal for equal numbers, and for one array."""
    return id(constant) if np.ndim(constant) else np.asarray(constant).tobytes()


def _bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _here(value: jax.Array) -> jax.Array:
    """What this process has of a value that each device has whole."""
    if not isinstance(value, jax.Array):
        return value
    if not value.is_fully_replicated:
        value = mesh.place(value, mesh.replicated_like(value.sharding))
    return value.addressable_data(0)


def _function(jaxpr: Jaxpr) -> Callable[..., list[jax.Array]]:
    return core.jaxpr_as_fun(closed(jaxpr))


Build: TypeAlias = Callable[..., tuple[PyTree, list[jax.Array]]]
"""Of arrays a state, and arrays `[replica, ...]`, of which each has its version."""


def build_replicated(
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    replicas: Replicas,
    specs: PyTree = None,
) -> PyTree:
    """`fn(*args)`, compiled so that its arrays lie as `replicas` keep their state."""
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

    def build(*given_arrays: jax.Array) -> PyTree:
        given = dict(zip(traced, given_arrays, strict=True))
        seen = [given.get(index, leaf) for index, leaf in enumerate(leaves)]
        returned = _called(fn, jax.tree.unflatten(treedef, seen), replicas)
        returned, stacked = _without_versions(returned, replicas)
        arrays, results = _results.take_apart(returned, leaves, name_of(fn))
        return results.rebuild(arrays), stacked

    given = [leaves[index] for index in traced]
    inner = InnerState(specs, args, replicas)
    if replicas.state_sharding is not None and not _are_traced(given):
        return _with_versions(
            *build_divided(build, given, replicas, inner, name_of(fn))
        )
    arrays = building.replicate(given, replicas)
    built, stacked = _built(build, arrays, inner, replicas)
    if not replicas.are_all_local:  # what `fn` closes over may differ
        built = jax.tree.map(lambda leaf: _of_first_process(leaf, replicas), built)
    elif replicas.state_sharding is not None:
        built = building.replicate(built, replicas)
    return _with_versions(built, stacked)


def _called(
    fn: Callable[..., PyTree], args: Sequence[PyTree], replicas: Replicas
) -> PyTree:
    """What `fn` returns, traced where inner axes have names if need be."""
    with without_eager_sharding():
        try:
            # Where there is a mesh, Flax refuses annotations of its attention layers,
            # which it makes as matrices first (0.12).
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
            if (told := unknown_axis(error, name_of(fn), replicas)) is None:
                raise
            raise told from error


def _built(
    build: Build, arrays: Sequence[Leaf], inner: InnerState, replicas: Replicas
) -> tuple[PyTree, list[jax.Array]]:
    """`build(*arrays)`, whole over the replicas."""
    where = replicas.sharding(STACKED)
    if not inner.is_asked:
        whole = replicas.sharding(REPLICATED)
        return jax.jit(build, out_shardings=(whole, where))(*arrays)
    traced, types = jax.make_jaxpr(build, return_shape=True)(*arrays)
    state, versions = types
    wanted = [*inner.shardings(state), *[where] * len(versions)]
    built = jax.jit(core.jaxpr_as_fun(traced), out_shardings=wanted)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(types), built)


def _of_first_process(leaf: jax.Array, replicas: Replicas) -> jax.Array:
    """What the first process has built, on the devices of all."""
    if leaf.is_fully_replicated:
        return mesh.broadcast(leaf.addressable_data(0), replicas.sharding(REPLICATED))
    assert isinstance(leaf.sharding, NamedSharding), "it lies on a mesh"
    # The devices of one replica are of one process.
    return mesh.broadcast(assembled(leaf), leaf.sharding)


def _are_traced(arrays: Sequence[Leaf]) -> bool:
    """Whether JAX traces the code that builds, so that nothing is there to be built."""
    return _arrays.is_traced() or any(isinstance(array, Tracer) for array in arrays)


@dataclasses.dataclass(frozen=True)
class _Versions:
    """The place of a `PerReplica` of the result, number `n` of them."""

    n: int


def _without_versions(
    tree: PyTree, replicas: Replicas
) -> tuple[PyTree, list[jax.Array]]:
    """`tree` with a mark for each `PerReplica` that was built, and their arrays."""
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

    marks = jax.tree.map_with_path(marked, tree, is_leaf=_results.is_one_leaf)
    return marks, stacked


def _with_versions(tree: PyTree, stacked: Sequence[jax.Array]) -> PyTree:
    """`tree` with the `PerReplica`s of these arrays in place of their marks."""

    def unmarked(leaf: Leaf) -> Leaf:
        return PerReplica(stacked[leaf.n]) if isinstance(leaf, _Versions) else leaf

    plain = _results.unwrap_plain(tree)
    return jax.tree.map(unmarked, plain, is_leaf=per_replica.is_per_replica)
