"""What becomes of `tf.keras`: Keras 3 on the JAX backend, if it has every name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from jaxstrategy.compat.port._keras_names import NAMES_IN_KERAS, WHOLE_MODULES
from jaxstrategy.compat.port._name import Name
from jaxstrategy.compat.port._python_program import PythonProgram

KERAS = (
    "Keras 3 on the JAX backend: `fit`, `evaluate` and `predict` of a model made in "
    "`strategy.scope()` work as they are; a step of `run` changes no variable in "
    "place: `js.keras.stateless_call`"
)
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
    """The row of a name of `tf.keras`.

    Args:
      name: with `tf.` first.
      rewritten: whether Keras 3 has all names that the program uses.
    """
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
    """How a step with a `GradientTape` of a Keras model is written, in its own names.

    Args:
      program: the program.
      tape: the name `tf.GradientTape` in it.
    """
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
    for call, target in _calls(program, block.body):
        if program.code(call.func) == model:
            outputs = target or outputs
            given = ", ".join(_code_of(program, arg) for arg in call.args)
    optimizer = next(
        (
            program.code(call.func.value)
            for call, _ in _calls(program, function)
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
    for call, target in _calls(program, function):
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


def _calls(
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
        yield from _calls(program, child)


def _code_of(program: PythonProgram, arg: cst.Arg) -> str:
    return " ".join(
        program.code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)).split()
    )
