"""The copies of a variable as a table for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import html as _html
from jaxstrategy._src.text.array_types import array_type
from jaxstrategy._src.text.units import with_noun
from jaxstrategy._src.values.value_text import line_of_value, value_text


def html_of_copies(
    title: str, replicas: Replicas, copies: Sequence[np.ndarray], are_equal: bool
) -> str:
    """The copies of this process, or one of them if all are equal.

    Args:
      title: of the report.
      replicas: those that have them.
      copies: one for each replica of this process.
      are_equal: whether one says all.
    """
    if are_equal:
        equal = f"equal on {with_noun(replicas.count, 'replica')}, "
        where = f"{equal if replicas.count > 1 else 'on '}{replicas.device_names}"
        text = html.escape(value_text(copies[0]))
        value = f'<pre style="margin:.3em 0;color:inherit">{text}</pre>'
        return _html.page(title, [_html.paragraph(where), value])
    rows = [
        (number, replicas.device_names_of(number), _line(copy))
        for number, copy in zip(replicas.own, copies, strict=True)
    ]
    return _html.rows_of(title, ("replica", "device", "copy"), rows)


def _line(copy: np.ndarray) -> str:
    return line_of_value(copy) or array_type(copy.dtype, copy.shape)
