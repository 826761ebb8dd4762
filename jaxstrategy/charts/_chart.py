"""What all charts have: a title, a drawing and a legend."""

from __future__ import annotations

from collections.abc import Iterable

from jaxstrategy.text import _html_report
from jaxstrategy.text._html_colours import Colour


def chart(title: str, drawing: str, legend: Iterable[tuple[Colour, str]] = ()) -> str:
    """A drawing under its title and over its legend.

    Args:
      title: text; may be empty.
      drawing: an SVG element.
      legend: the colours in it and what they mean; one without a meaning is
        not told.
    """
    heading = _html_report.paragraph(title) if title else ""
    entries = "".join(_entry(*entry) for entry in dict.fromkeys(legend) if entry[1])
    below = f'<div style="margin:.2em 0;font-size:.85em">{entries}</div>'
    style = "margin:.6em 0 .9em"
    return f'<div style="{style}">{heading}{drawing}{below if entries else ""}</div>'


def _entry(colour: Colour, meaning: str) -> str:
    square = (
        "display:inline-block;width:.8em;height:.8em;margin-right:.35em;"
        f"background:{colour.css}"
    )
    return (
        '<span style="display:inline-block;margin-right:1.2em">'
        f'<span style="{square}"></span>{_html_report.marked(meaning)}</span>'
    )
