"""What a name of TensorFlow means where a program uses it."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterator
from typing import final

import libcst as cst

from jaxstrategy._src.compat.port.keras_names import NAMES_IN_KERAS, WHOLE_MODULES
from jaxstrategy._src.compat.port.program import (
    Edit,
    Finding,
    PythonProgram,
    Uses,
    found,
    root,
)
from jaxstrategy._src.compat.port.tables import (
    FORMER,
    INTERNAL,
    KERAS,
    NAMES,
    Form,
    Name,
)


@final
class Generation(enum.Enum):
    """The three generations; `said` is how messages call them."""

    TF2 = "tf2"
    TF1 = "tf1"
    CONTRIB = "2018"

    @property
    def said(self) -> str:
        return {
            "tf2": "`tf.distribute` of TensorFlow 2",
            "tf1": "`tf.compat.v1.distribute` of TensorFlow 1.13 to 1.15",
            "2018": "`tf.contrib.distribute` of TensorFlow 1.7 to 1.12",
        }[self.value]


_TOWERS = frozenset(
    "call_for_each_tower get_tower_context get_cross_tower_context num_towers tower_id "
    "distribute_dataset run_steps_on_dataset is_single_tower get_update_device "
    "TowerContext "
    "DistributionStrategy worker_device_index cross_tower_ops increment_var".split()
)
_REPLICAS = frozenset(
    "num_replicas_in_sync get_replica_context experimental_local_results "
    "experimental_run_v2 replica_id_in_sync_group experimental_distribute_dataset "
    "call_for_each_replica make_dataset_iterator make_input_fn_iterator "
    "cross_device_ops".split()
)
_ITERATORS = frozenset(
    "experimental_run make_dataset_iterator make_input_fn_iterator "
    "call_for_each_replica experimental_run_steps_on_iterator non_slot_devices "
    "experimental_make_numpy_dataset update_config_proto read_var update_non_slot "
    "experimental_initialize experimental_finalize".split()
)
_GRAPHS = frozenset(
    "tf.Session tf.ConfigProto tf.get_variable tf.placeholder tf.app tf.flags "
    "tf.global_variables_initializer tf.variable_scope tf.enable_eager_execution "
    "tf.train.AdamOptimizer tf.train.GradientDescentOptimizer tf.layers "
    "tf.train.get_or_create_global_step tf.logging tf.train.MonitoredTrainingSession "
    "tf.disable_v2_behavior tf.train.MomentumOptimizer".split()
)


def generation_of(
    names: Collection[str], attributes: Collection[str]
) -> Generation | None:
    """The generation of a program; None if it does not use `tf.distribute`."""
    attributes = set(attributes)
    if _any_in(names, "tf.contrib.distribute"):
        older = attributes & _TOWERS or not attributes & _REPLICAS
        return Generation.CONTRIB if older else Generation.TF1
    newer = _any_in(names, "tf.distribute") or _any_in(names, "tf.compat.v1.distribute")
    if names and attributes & _TOWERS and not newer:
        return Generation.CONTRIB
    if _any_in(names, "tf.compat.v1.distribute") or (names and attributes & _ITERATORS):
        return Generation.TF1
    if _any_in(names, "tf.distribute"):
        graphs = any(_any_in(names, graph) for graph in _GRAPHS)
        return Generation.TF1 if graphs else Generation.TF2
    if names and attributes & _REPLICAS:
        return Generation.TF2
    return None


def _any_in(names: Collection[str], module: str) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for name in names)


_WAITS = (
    "becomes `keras`, on the JAX backend, once the program uses only names of "
    "`tf.keras` that Keras 3 has"
)
_MISSING = (
    "Keras 3 has no such name; without it, `tf.keras` becomes `keras` on the JAX "
    "backend"
)
REDUCTION = "tf.keras.losses.Reduction"
_REDUCTIONS = {
    "NONE": '"none"',
    "SUM": '"sum"',
    "SUM_OVER_BATCH_SIZE": '"sum_over_batch_size"',
    "AUTO": '"sum_over_batch_size"',
}
# Where Keras 2 kept what Keras 3 has in the module above.
_FORMER = re.compile(
    r"^tf\.keras\.(layers|optimizers|callbacks)\."
    r"(?:experimental\.preprocessing|experimental|legacy)(?=\.|$)"
)


def canonical_in_keras(name: str) -> str:
    """The name without `experimental` or `legacy`, where Keras 3 has it without."""
    public = _FORMER.sub(r"tf.keras.\1", name)
    return public if is_in_keras(public) else name


def is_in_keras(name: str) -> bool:
    """Whether Keras 3 has a name of `tf.keras`, a module or something in one."""
    if name.startswith(REDUCTION):
        return name.removeprefix(f"{REDUCTION}.") in _REDUCTIONS
    module = "keras"
    for part in name.split(".")[2:]:
        inner = f"{module}.{part}"
        if inner in WHOLE_MODULES:
            return True
        if not any(f"{each}.".startswith(f"{inner}.") for each in NAMES_IN_KERAS):
            return part in NAMES_IN_KERAS.get(module, ())
        module = inner
    return True


def keras_row(name: str, rewritten: bool) -> Name:
    """The row of a name of `tf.keras`."""
    if name == REDUCTION and rewritten:  # imported: its members have rows
        return Name(name, "keras.losses", exact=True)
    if not is_in_keras(name):
        return Name(name, None, _MISSING)
    if not rewritten:
        return Name(name, None, _WAITS)
    if name.startswith(REDUCTION):
        return Name(name, _REDUCTIONS[name.rpartition(".")[2]], exact=True)
    return Name(name, name.removeprefix("tf."), KERAS, exact=name == "tf.keras")


def tape_advice(program: PythonProgram, tape: cst.CSTNode) -> str | None:
    """How a step with a tape over a Keras model is written, in its own names."""
    item = program.parents.get(program.parents.get(tape, tape))
    block = program.parents.get(item) if item is not None else None
    if not (isinstance(item, cst.WithItem) and isinstance(block, cst.With)):
        return None
    if item.asname is None:
        return None
    function: cst.CSTNode = block
    while not isinstance(function, cst.FunctionDef | cst.Module):
        function = program.parents[function]
    found = _gradient(program, function, program.code(item.asname.name).strip())
    if found is None:
        return None
    gradients, loss, model = found
    outputs, given = "outputs", "..."
    for call, target in _assigned_calls(program, block.body):
        if program.code(call.func) == model:
            outputs = target or outputs
            given = ", ".join(_code_of(program, arg) for arg in call.args)
    optimizer = next(
        (
            program.code(call.func.value)
            for call, _ in _assigned_calls(program, function)
            if isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "apply_gradients"
        ),
        "optimizer",
    )
    return (
        "write the block as `def loss_of(trainable, others)`, with "
        f"`{outputs}, others = js.keras.stateless_call({model}, trainable, others, "
        f"{given})` first and `return {loss}, others` last; then `({loss}, others), "
        f"{gradients} = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)`, "
        f"`{gradients} = js.get_replica_context().all_reduce('sum', {gradients})` and "
        f"`trainable, slots = {optimizer}.stateless_apply(slots, {gradients}, "
        "trainable)`. The step is given the lists, of the values in "
        f"`{model}.trainable_variables`, `{model}.non_trainable_variables` and "
        f"`{optimizer}.variables`, and returns them"
    )


def _gradient(
    program: PythonProgram, function: cst.CSTNode, tape: str
) -> tuple[str, str, str] | None:
    """What `tape.gradient` is assigned to, the loss, and the model."""
    for call, target in _assigned_calls(program, function):
        if program.code(call.func) != f"{tape}.gradient" or len(call.args) < 2:
            continue
        of = call.args[1].value
        if isinstance(of, cst.Name):
            of = _assigned(function, of.value) or of
        if isinstance(of, cst.Attribute) and of.attr.value.startswith("trainable_"):
            loss = call.args[0].value
            name = loss.value if isinstance(loss, cst.Name) else "loss"
            return target or "gradients", name, program.code(of.value)
    return None


def _assigned(node: cst.CSTNode, name: str) -> cst.BaseExpression | None:
    if isinstance(node, cst.Assign) and len(node.targets) == 1:
        target = node.targets[0].target
        if isinstance(target, cst.Name) and target.value == name:
            return node.value
    found = (_assigned(child, name) for child in node.children)
    return next((each for each in found if each is not None), None)


def _assigned_calls(
    program: PythonProgram, node: cst.CSTNode
) -> Iterator[tuple[cst.Call, str | None]]:
    """Each call in some code, with the name that it is assigned to."""
    if isinstance(node, cst.Call):
        parent = program.parents.get(node)
        target = None
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            first = parent.targets[0].target
            target = first.value if isinstance(first, cst.Name) else None
        yield node, target
    for child in node.children:
        yield from _assigned_calls(program, child)


def _code_of(program: PythonProgram, arg: cst.Arg) -> str:
    return " ".join(
        program.code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)).split()
    )


_V1, _CONTRIB = "tf.compat.v1.distribute", "tf.contrib.distribute"

_COLLECTIVE = ("CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy")
# Variables that are found again by their names.
_BY_NAME = {
    f"tf.{name}": {
        Generation.TF1: f"{_V1}.{name}",
        Generation.CONTRIB: f"{_CONTRIB}.{name}",
    }
    for name in "get_variable variable_scope AUTO_REUSE get_variable_scope".split()
}
# What TensorFlow 2 has at the top from Keras, and TensorFlow 1 of its own.
_OF_KERAS = re.compile(r"^tf\.(initializers|losses|metrics|optimizers)(?=\.|$)")


def canonical(full: str) -> str:
    """A name with `tf.` first, as `tf.distribute.Strategy`."""
    full = re.sub(r"^tensorflow_core\b", "tensorflow", full)
    name = _of_internal(full) or f"tf{full.removeprefix('tensorflow')}"
    name = re.sub(r"^tf\.compat\.(v2\b|v1\b(?!\.distribute\b))", "tf", name)
    name = re.sub(r"^tf\.dtypes\.(?=\w+$)", "tf.", name)
    name = FORMER.get(name, name)
    if f"{name}.".startswith("tf.keras."):
        return canonical_in_keras(name)
    if name not in NAMES:
        nearby = name.replace("tf.distribute.", "tf.distribute.experimental.", 1)
        return nearby if nearby in NAMES else name
    return name


def _of_internal(full: str) -> str | None:
    """The public name of something in TensorFlow's own modules."""
    for pattern, public in INTERNAL.items():
        module = pattern.removesuffix(".*")
        if not f"{full}.".startswith(f"{module}."):
            continue
        rest = full.removeprefix(module).split(".")[1:]
        if pattern.endswith(".*") and rest and not rest[0][0].isupper():
            rest = rest[1:]
        return ".".join([public, *rest])
    return None


def in_generation(name: str, generation: Generation | None) -> str:
    """The name that a program of this generation means."""
    if generation is Generation.TF2:
        return _OF_KERAS.sub(r"tf.keras.\1", name)
    if name in _BY_NAME and generation in _BY_NAME[name]:
        return _BY_NAME[name][generation]
    if generation is not Generation.TF1 and not (
        generation is Generation.CONTRIB and name.startswith("tf.distribute")
    ):
        return name
    name = name.replace(*_COLLECTIVE)
    for module in ("tf.distribute", _CONTRIB):
        if f"{name}.".startswith(f"{module}."):
            rest = name.removeprefix(module)
            for place in (_V1, f"{_V1}.experimental"):
                if _known(place + rest):
                    return place + rest
    return name


def _known(name: str) -> bool:
    """Whether the table has it, or the class whose attribute it is."""
    parts = name.split(".")
    return any(
        (row := NAMES.get(".".join(parts[:end]))) is not None
        and (end == len(parts) or not row.exact)
        for end in range(len(parts), 3, -1)
    )


def fitted(program: PythonProgram, node: cst.CSTNode, form: Form) -> list[Edit] | None:
    """The changes of a call's arguments; None if it does not mean the same."""
    call = program.parents.get(node)
    if not (isinstance(call, cst.Call) and call.func is node):
        return [] if form.bare else None
    if any(arg.star for arg in call.args) or not _has_needed(call, form):
        return None
    if form.avoided and re.search(form.avoided, program.code(call)):
        return None
    given = [arg for arg in call.args if arg.keyword is None]
    if len(given) > form.positional or not _takes_first(call, form):
        return None
    edits: list[Edit] = []
    for index, arg in enumerate(call.args):
        if arg.keyword is None:
            continue
        name = arg.keyword.value
        if name == "name" and "name" not in form.keywords and _is_plain(arg.value):
            edits.append(_without(program, call, index))
        elif name not in form.keywords:
            return None
        elif not form.keywords[name]:
            if index != len(given):
                return None
            start, end = program.span(arg)[0], program.span(arg.value)[0]
            edits.append(Edit(start, end, ""))
        elif form.keywords[name] != name:
            edits.append(program.edit(arg.keyword, form.keywords[name]))
    return edits


def _has_needed(call: cst.Call, form: Form) -> bool:
    keywords = {arg.keyword.value for arg in call.args if arg.keyword}
    count = sum(arg.keyword is None for arg in call.args)
    return all(place < count or name in keywords for place, name in form.needed)


def _takes_first(call: cst.Call, form: Form) -> bool:
    if not call.args:
        return True
    first = call.args[0].value
    listed = isinstance(first, cst.List | cst.Tuple | cst.ListComp)
    return (form.lists or not listed) and (form.texts or not _has_text(first))


def _has_text(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.List | cst.Tuple):
        return any(_has_text(each.value) for each in node.elements)
    return isinstance(
        node, cst.SimpleString | cst.FormattedString | cst.ConcatenatedString
    )


def _is_plain(node: cst.BaseExpression) -> bool:
    """Whether leaving it out leaves out nothing that happens."""
    return isinstance(node, cst.SimpleString | cst.Name | cst.FormattedString)


def _without(program: PythonProgram, call: cst.Call, index: int) -> Edit:
    """Leaves out an argument, with the comma before it, or the one behind."""
    start, end = program.span(call.args[index])
    if index > 0:
        return Edit(
            program.span(call.args[index - 1].value)[1], _end(program, call, index), ""
        )
    if len(call.args) > 1:
        return Edit(start, program.span(call.args[1])[0], "")
    return Edit(start, end, "")


def _end(program: PythonProgram, call: cst.Call, index: int) -> int:
    return program.span(call.args[index].value)[1]


_PIPELINES = frozenset(
    "map filter flat_map interleave apply take_while group_by_window scan "
    "map_and_batch parallel_interleave".split()
)
_TEXT = "stays TensorFlow, as a dataset of tf.data runs it"


@final
class KeptCode:
    """Code that datasets of tf.data run, and methods of Keras classes."""

    def __init__(self, uses: Uses, row: Callable[[str], Name], keras: bool) -> None:
        self._uses, self._program, self._row = uses, uses.program, row
        self._spans: list[tuple[int, int]] = []
        self._types: list[tuple[int, int]] = []
        self.findings: list[Finding] = []
        names: set[str] = set()
        for call in uses.calls:
            names |= self._of_call(call)
        for each in () if keras else uses.classes:
            if any(self._is(base.value, "tf.keras") for base in each.bases):
                self._spans.append(self._program.span(each.body))
        self._add_functions(names)

    def holds(self, node: cst.CSTNode) -> bool:
        """Whether a name stands in such code."""
        return _within(self._program.span(node), self._spans)

    def holds_type(self, node: cst.CSTNode) -> bool:
        """Whether a type is an argument of a function that stays TensorFlow's."""
        return _within(self._program.span(node), self._types)

    def _of_call(self, call: cst.Call) -> set[str]:
        """Keeps what a call's arguments are; names of functions that it is given."""
        if self._is_pipeline(call):
            return set().union(*map(self._given, call.args))
        if self._of_tensorflow(call.func) and not self._has_name(call.func):
            self._types += [self._program.span(arg) for arg in call.args]
        return set()

    def _is_pipeline(self, call: cst.Call) -> bool:
        """Whether it makes a dataset, or is a method of one."""
        if self._is(_innermost(call.func), "tf.data", "tf.contrib.data"):
            return True
        if not isinstance(call.func, cst.Attribute) or self._of_tensorflow(call.func):
            return False
        base = root(call.func)
        of_jax = base is not None and any(
            name.split(".")[0] in ("jax", "jaxstrategy", "functools", "pandas", "numpy")
            for name in self._program.meanings(base)
        )
        return call.func.attr.value in _PIPELINES and not of_jax

    def _given(self, arg: cst.Arg) -> set[str]:
        if isinstance(arg.value, cst.Name):
            return {arg.value.value}
        self._spans.append(self._program.span(arg))
        self._types.append(self._program.span(arg))
        return _called(arg.value)

    def _add_functions(self, names: set[str]) -> None:
        """Keeps the functions of these names, and those that they call."""
        done: set[str] = set()
        while names - done:
            name = min(names - done)
            done.add(name)
            for function in self._uses.functions.get(name, ()):
                self._spans.append(self._program.span(function))
                place = self._program.place(function)
                self.findings.append(found(f"def {name}", _TEXT, place, False))
                names = names | _called(function.body)

    def _of_tensorflow(self, node: cst.BaseExpression) -> bool:
        return self._is(_innermost(node), "tf")

    def _has_name(self, node: cst.BaseExpression) -> bool:
        names = self._program.meanings(node) if root(node) else []
        return any(self._row(name).new is not None for name in names)

    def _is(self, node: cst.BaseExpression, *modules: str) -> bool:
        if root(node) is None:
            return False
        return any(
            f"{canonical(name)}.".startswith(f"{module}.")
            for name in self._program.meanings(node)
            if name.split(".")[0] in ("tensorflow", "tensorflow_core")
            for module in modules
        )


def _innermost(node: cst.BaseExpression) -> cst.BaseExpression:
    """`a.b` of `a.b(...).c(...).d`: what a chain of calls begins with."""
    while root(node) is None and isinstance(node, cst.Attribute | cst.Call):
        inner = node.func if isinstance(node, cst.Call) else node.value
        node = inner
    return node


def _called(node: cst.CSTNode) -> set[str]:
    """The names of functions that code calls."""
    return set(_calls(node))


def _calls(node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        yield node.func.value
    for child in node.children:
        yield from _calls(child)


def _within(span: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)
