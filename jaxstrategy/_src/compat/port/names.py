"""Names of TensorFlow: what stands for them (`tables.toml`), what a program means."""

from __future__ import annotations

import dataclasses
import enum
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import libcst as cst
from libcst import matchers

from jaxstrategy._src.compat.port.program import ROOTS, Edit, Program, root

DATA: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text("utf-8")
)


def _pairs(words: str) -> dict[str, str]:
    found = (word.partition("=") for word in words.split())
    return {old: new if sign else old for old, sign, new in found}


@final
@dataclasses.dataclass(frozen=True)
class CallPattern:
    """How a function may be called so that the new one means the same."""

    positional: int  # the most arguments without a name
    # The new name of each that may be named; without one, it is given by its place.
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    required: tuple[tuple[int, str], ...] = ()  # by their place or old name
    texts: bool = True  # whether the first may be a string
    lists: bool = True  # or a list
    bare: bool = True  # whether the function may be passed on without being called
    avoided: str = ""  # a pattern of arguments' code that means something else


@final
@dataclasses.dataclass(frozen=True)
class Name:
    """An old name, what stands for it here, and what a person must know."""

    old: str  # with its modules, `tf.` first
    new: str | None  # with its modules; None if a person must decide
    text: str = ""  # how the new one differs; without one, what to do
    exact: bool = False  # names in it, or attributes of it, are not the same here
    pattern: CallPattern | None = None  # which calls are the same; None: all
    stays: bool = False  # it may stay TensorFlow's
    certain: bool = True  # False if it means the same of arrays of JAX only
    # A type, which is the same only as an annotation, or as an argument of a function
    # that is renamed.
    type: bool = False


_PATTERNS = {
    name: CallPattern(**{**pattern, "keywords": _pairs(pattern.get("keywords", ""))})
    for name, pattern in DATA["patterns"].items()
}


def _rows(table: str) -> Iterator[Name]:
    for group in DATA[table]:
        old, new = group.pop("old", ""), group.pop("new", None)
        texts, text = group.pop("texts", {}), group.pop("text", "")
        pattern = _PATTERNS.get(group.pop("pattern", ""))
        if table == "arrays":
            group |= {"exact": True, "certain": False}
        for name, here in _pairs(group.pop("names")).items():
            full = f"{old}.{name}" if old else name
            target = f"{new}.{here}" if new else here if new == "" else None
            given = {"exact": new == "", **group}
            told = text or texts.get(name, "")
            yield Name(full, target, told, pattern=pattern, **given)


TABLES = {
    each: tuple(_rows(each)) for each in ("tf2", "tf1", "2018", "arrays", "others")
}
ARRAYS = TABLES["arrays"]
ROWS = tuple(row for rows in TABLES.values() for row in rows)
NAMES = {row.old: row for row in ROWS}


def row_of(name: str) -> Name:
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        row = NAMES.get(".".join(parts[:end]))
        if row is not None and (end == len(parts) or row.new is None or not row.exact):
            return row
    return NAMES["tf"]


@final
@dataclasses.dataclass(frozen=True)
class Method:
    """A method that programs of some generations call."""

    name: str
    generations: str
    text: str = ""  # how it differs
    receiver: str = ""  # a pattern of the objects meant; none: only strategies have it
    new: str = ""  # its name here, if it has another


METHODS = tuple(Method(**row) for row in DATA["methods"])
# Of programs whose `tf.keras` becomes Keras 3.
KERAS_METHODS = tuple(Method(**row) for row in DATA["keras_methods"])


def words(name: str) -> frozenset[str]:
    return frozenset(DATA["words"][name].split())


@final
class Generation(enum.Enum):
    TF2 = "tf2"
    TF1 = "tf1"
    CONTRIB = "2018"

    @property
    def said(self) -> str:
        return DATA["messages"][self.value]


_V1, _CONTRIB = "tf.compat.v1.distribute", "tf.contrib.distribute"
_OLDEST, _NEWER = words("towers"), words("replicas")


def generation_of(
    names: Collection[str], attributes: Collection[str]
) -> Generation | None:
    """The generation of a program; None if it does not use `tf.distribute`."""

    def has(*modules: str) -> bool:
        return any(is_in(name, *modules) for name in names)

    attributes = set(attributes)
    if has(_CONTRIB):
        older = attributes & _OLDEST or not attributes & _NEWER
        return Generation.CONTRIB if older else Generation.TF1
    if names and attributes & _OLDEST and not has("tf.distribute", _V1):
        return Generation.CONTRIB
    if has(_V1) or (names and attributes & words("iterators")):
        return Generation.TF1
    if has("tf.distribute"):
        return Generation.TF1 if has(*words("graphs")) else Generation.TF2
    return Generation.TF2 if names and attributes & _NEWER else None


def is_in(name: str, *modules: str) -> bool:
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


# Names of Keras.

REDUCTION = "tf.keras.losses.Reduction"
_REDUCTIONS = DATA["reductions"]
# Where Keras 2 kept what Keras 3 has in the module above.
_FORMER_KERAS = re.compile(
    r"^tf\.keras\.(layers|optimizers|callbacks)\."
    r"(?:experimental\.preprocessing|experimental|legacy)(?=\.|$)"
)


def is_in_keras(name: str) -> bool:
    """Whether Keras 3 has a name of `tf.keras`, a module or something in one."""
    if name.startswith(REDUCTION):
        return name.removeprefix(f"{REDUCTION}.") in _REDUCTIONS
    modules, module = DATA["keras"], "keras"
    for part in name.split(".")[2:]:
        inner = f"{module}.{part}"
        if modules.get(inner) == "":  # every name in it counts as known
            return True
        if not any(is_in(each, inner) for each in modules):
            return part in modules.get(module, "").split()
        module = inner
    return True


def keras_row(name: str, rewritten: bool) -> Name:
    if name == REDUCTION and rewritten:  # imported: its members have rows
        return Name(name, "keras.losses", exact=True)
    if not rewritten or not is_in_keras(name):
        message = "waits" if is_in_keras(name) else "missing"
        return Name(name, None, DATA["messages"][message])
    if name.startswith(REDUCTION):
        return Name(name, _REDUCTIONS[name.rpartition(".")[2]], exact=True)
    row = NAMES["tf.keras"]
    return Name(name, name.removeprefix("tf."), row.text, exact=name == row.old)


def tape_advice(program: Program, tape: cst.CSTNode) -> str | None:
    """How a step with a tape over a Keras model is written, in its own names."""
    item = program.parents.get(program.parents.get(tape, tape))
    if not isinstance(item, cst.WithItem) or item.asname is None:
        return None
    block: cst.CSTNode = program.parents[item]
    function = block
    while not isinstance(function, cst.FunctionDef | cst.Module):
        function = program.parents[function]
    inner, outer = (" ".join(program.code(n).split()) for n in (block, function))
    tape_name = program.code(item.asname.name).strip()
    taken = re.search(
        rf"(?:(\w+) = )?\b{tape_name}\.gradient\( ?(?:(\w+)|[^,]+), ?([\w.]+)", outer
    )
    if taken is None:
        return None
    gradients, loss, of = taken[1] or "gradients", taken[2] or "loss", taken[3]
    if assigned := re.search(rf"\b{of} = ([\w.]+)", outer):
        of = assigned[1]
    model, _, attribute = of.rpartition(".")
    if not model or not attribute.startswith("trainable_"):
        return None
    arguments = r"\( ?((?:[^()]|\((?:[^()]|\([^()]*\))*\))*?),? ?\)"
    call = re.search(rf"(?:(\w+) = )?(?<![\w.]){re.escape(model)}{arguments}", inner)
    outputs, given = (call[1] or "outputs", call[2]) if call else ("outputs", "...")
    applied = re.search(r"([\w.]+)\.apply_gradients\(", outer)
    optimizer = applied[1] if applied else "optimizer"
    return DATA["messages"]["tape"].format(
        outputs=outputs,
        model=model,
        given=given,
        loss=loss,
        gradients=gradients,
        optimizer=optimizer,
    )


# Other names.


def canonical(full: str) -> str:
    """A name with `tf.` first, as `tf.distribute.Strategy`."""
    full = re.sub(r"^tensorflow_core\b", "tensorflow", full)
    name = f"tf{full.removeprefix('tensorflow')}"
    for pattern, public in DATA["internal"].items():
        module = pattern.removesuffix(".*")
        if is_in(full, module):
            rest = full.removeprefix(module).split(".")[1:]
            if pattern != module and rest and not rest[0][0].isupper():
                rest = rest[1:]
            name = ".".join([public, *rest])
            break
    name = re.sub(r"^tf\.compat\.(v2\b|v1\b(?!\.distribute\b))", "tf", name)
    name = re.sub(r"^tf\.dtypes\.(?=\w+$)", "tf.", name)
    name = DATA["former"].get(name, name)
    if is_in(name, "tf.keras"):
        public = _FORMER_KERAS.sub(r"tf.keras.\1", name)
        return public if is_in_keras(public) else name
    if name not in NAMES:
        nearby = name.replace("tf.distribute.", "tf.distribute.experimental.", 1)
        return nearby if nearby in NAMES else name
    return name


# Variables that are found again by their names.
_BY_NAME = re.compile(
    r"^tf\.(get_variable|variable_scope|AUTO_REUSE|get_variable_scope)$"
)
# What TensorFlow 2 has at the top from Keras, and TensorFlow 1 of its own.
_OF_KERAS = re.compile(r"^tf\.(initializers|losses|metrics|optimizers)(?=\.|$)")


def in_generation(name: str, generation: Generation | None) -> str:
    if generation is Generation.TF2:
        return _OF_KERAS.sub(r"tf.keras.\1", name)
    if generation is None:
        return name
    is_v1 = generation is Generation.TF1
    if _BY_NAME.match(name):
        return name.replace("tf", _V1 if is_v1 else _CONTRIB, 1)
    if not is_v1 and not name.startswith("tf.distribute"):
        return name
    name = name.replace("CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy")
    for module in ("tf.distribute", _CONTRIB):
        for place in (_V1, f"{_V1}.experimental"):
            moved = place + name.removeprefix(module)
            if is_in(name, module) and row_of(moved) is not NAMES["tf"]:
                return moved
    return name


# Calls.


def argument_edits(
    program: Program, node: cst.CSTNode, pattern: CallPattern
) -> list[Edit] | None:
    """The changes of a call's arguments; None if it does not mean the same."""
    call = program.parents.get(node)
    if not (isinstance(call, cst.Call) and call.func is node):
        return [] if pattern.bare else None
    keywords = {arg.keyword.value for arg in call.args if arg.keyword}
    count = sum(arg.keyword is None for arg in call.args)
    if (
        any(arg.star for arg in call.args)
        or count > pattern.positional
        or any(at >= count and name not in keywords for at, name in pattern.required)
        or (pattern.avoided and re.search(pattern.avoided, program.code(call)))
        or (call.args and not pattern.texts and _has_text(call.args[0].value))
        or (call.args and not pattern.lists and isinstance(call.args[0].value, _LISTS))
    ):
        return None
    edits: list[Edit] = []
    for index, arg in enumerate(call.args):
        if arg.keyword is None:
            continue
        name = arg.keyword.value
        # Leaving out a name leaves out nothing that happens.
        plain = isinstance(arg.value, cst.SimpleString | cst.Name | cst.FormattedString)
        if name == "name" and "name" not in pattern.keywords and plain:
            edits.append(_without(program, call, index))
        elif name not in pattern.keywords:
            return None
        elif not pattern.keywords[name]:
            if index != count:
                return None
            start, end = program.span(arg)[0], program.span(arg.value)[0]
            edits.append(Edit(start, end, ""))
        elif pattern.keywords[name] != name:
            edits.append(program.edit(arg.keyword, pattern.keywords[name]))
    return edits


_LISTS = cst.List | cst.Tuple | cst.ListComp


def _has_text(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.List | cst.Tuple):
        return any(_has_text(each.value) for each in node.elements)
    return isinstance(
        node, cst.SimpleString | cst.FormattedString | cst.ConcatenatedString
    )


def _without(program: Program, call: cst.Call, index: int) -> Edit:
    """Leaves out an argument, with the comma before it, or the one behind."""
    if index > 0:
        before, own = (program.span(call.args[i].value)[1] for i in (index - 1, index))
        return Edit(before, own, "")
    start, end = program.span(call.args[0])
    return Edit(start, program.span(call.args[1])[0] if len(call.args) > 1 else end, "")


# Code that stays TensorFlow's.


@final
class UnportedCode:
    """Code that datasets of tf.data run, and methods of Keras classes."""

    def __init__(
        self, program: Program, row: Callable[[str], Name], keras: bool
    ) -> None:
        self._program = program
        self._spans: list[tuple[int, int]] = []
        self._types: list[tuple[int, int]] = []
        self.functions: list[tuple[str, cst.FunctionDef]] = []
        names: set[str] = set()
        for call in program.nodes(cst.Call):
            if self._is_pipeline(call):
                for arg in call.args:
                    if isinstance(arg.value, cst.Name):
                        names.add(arg.value.value)
                    else:
                        self._spans.append(program.span(arg))
                        self._types.append(program.span(arg))
                        names |= _called(arg.value)
            elif self._is(_innermost(call.func), "tf"):
                meanings = program.meanings(call.func) if root(call.func) else []
                if all(row(name).new is None for name in meanings):
                    self._types += [program.span(arg) for arg in call.args]
        for each in () if keras else program.nodes(cst.ClassDef):
            if any(self._is(base.value, "tf.keras") for base in each.bases):
                self._spans.append(program.span(each.body))
        done: set[str] = set()
        while names - done:  # the functions of these names, and those that they call
            name = min(names - done)
            done.add(name)
            for function in program.functions.get(name, ()):
                self._spans.append(program.span(function))
                self.functions.append((name, function))
                names |= _called(function.body)

    def holds(self, node: cst.CSTNode, is_type: bool = False) -> bool:
        first, last = self._program.span(node)
        spans = self._types if is_type else self._spans
        return any(start <= first and last <= end for start, end in spans)

    def _is_pipeline(self, call: cst.Call) -> bool:
        begin = _innermost(call.func)
        if self._is(begin, "tf.data", "tf.contrib.data"):
            return True
        if not isinstance(call.func, cst.Attribute) or self._is(begin, "tf"):
            return False
        base = root(call.func)
        names = self._program.meanings(base) if base is not None else []
        is_other = any(name.split(".")[0] in words("others") for name in names)
        return call.func.attr.value in words("pipelines") and not is_other

    def _is(self, node: cst.CSTNode, *modules: str) -> bool:
        names = self._program.meanings(node) if root(node) is not None else []
        return any(
            is_in(canonical(name), *modules)
            for name in names
            if name.split(".")[0] in ROOTS
        )


def _innermost(node: cst.CSTNode) -> cst.CSTNode:
    """`a.b` of `a.b(...).c(...).d`: what a chain of calls begins with."""
    while root(node) is None and isinstance(node, cst.Attribute | cst.Call):
        node = node.func if isinstance(node, cst.Call) else node.value
    return node


def _called(node: cst.CSTNode) -> set[str]:
    calls = matchers.findall(node, matchers.Call(func=matchers.Name()))
    return {call.func.value for call in calls}  # pyright: ignore[reportAttributeAccessIssue]
