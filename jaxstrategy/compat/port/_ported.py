"""A program of an older generation, rewritten: `ported`."""

from __future__ import annotations

import dataclasses
from typing import final

from jaxstrategy.compat.port._canonical import canonical
from jaxstrategy.compat.port._edit import edited
from jaxstrategy.compat.port._finding import Finding, grouped
from jaxstrategy.compat.port._generation import Generation, generation_of
from jaxstrategy.compat.port._import_lines import with_imports
from jaxstrategy.compat.port._method_uses import method_uses
from jaxstrategy.compat.port._old_uses import OldUses
from jaxstrategy.compat.port._python_program import ROOTS, PythonProgram
from jaxstrategy.compat.port._uses import Uses

_HERE = ("jax", "jaxstrategy")


@final
@dataclasses.dataclass(frozen=True)
class Ported:
    """What became of a program.

    Attributes:
      text: the new one.
      findings: what a person must decide, then what differs without doing anything.
      generation: the one it was written for; None if it has nothing of `tf.distribute`.
    """

    text: str
    findings: tuple[Finding, ...]
    generation: Generation | None


def ported(text: str, generation: Generation | None = None) -> Ported:
    """The program with names of this package, and what a person must decide.

    Comments and format stay. A text that is ported stays as it is.

    Args:
      text: a Python program.
      generation: the one it is written for; by default what its names show.

    Raises:
      NoPythonError: the text cannot be parsed.

    >>> program = "import tensorflow as tf\\ns = tf.distribute.MirroredStrategy()"
    >>> print(ported(program).text)
    import jaxstrategy as js
    s = js.MirroredStrategy()
    """
    if not any(root in text for root in ROOTS):
        return Ported(text, (), None)
    uses = Uses(PythonProgram(text))
    started = any(e.full.split(".")[0] in _HERE for e in uses.imports)
    if generation is None:
        generation = _generation(uses, started)
    notes = generation is not None and not started
    outcome = OldUses(uses, generation, notes).decide_all()
    if generation is not None:
        edits, findings = method_uses(uses, generation, outcome.keras)
        outcome.edits += edits
        outcome.findings += findings if notes else []
    if outcome.edits:
        text = with_imports(edited(text, outcome.edits), uses.used(), outcome.keras)
    return Ported(text, grouped(outcome.findings), generation)


def _generation(uses: Uses, started: bool) -> Generation | None:
    written = {n for each in uses.references for n in each.names}
    written |= {each.full for each in uses.of_tensorflow()}
    # Programs of TensorFlow 2 have some names of `tf.compat.v1` besides.
    newer = {n for n in written if ".compat.v1." in n and ".distribute" not in n}
    names = {canonical(n) for n in written - newer}
    attributes = {node.attr.value for node in uses.attributes}
    attributes |= {each.full.rpartition(".")[2] for each in uses.of_tensorflow()}
    if started:  # methods of these names are this package's, in what is ported
        attributes = set()
    return generation_of(names, attributes)
