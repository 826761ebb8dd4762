"""Elements of SVG.

Lengths along the width are in percent and those along the height in pixels, in an
element as wide as the page: so a chart shrinks on a phone and its letters do not.
"""

from __future__ import annotations

import html

from jaxstrategy.text import _html_report
from jaxstrategy.text._html_colours import Colour

LETTER = 12
"""The height of letters, in pixels."""
MOST_WIDTH = 720
"""A chart is not wider, in pixels."""


def drawing(title: str, height: float, parts: list[str]) -> str:
    """A whole drawing.

    Args:
      title: what programs read aloud.
      height: in pixels.
      parts: elements.
    """
    style = f"display:block;max-width:{MOST_WIDTH}px;overflow:visible"
    return (
        f'<svg role="img" aria-label="{html.escape(title)}" width="100%" '
        f'height="{height:g}" style="{style}">{"".join(parts)}</svg>'
    )


def box(
    begin: float,
    end: float,
    top: float,
    height: float,
    colour: Colour,
    title: str = "",
    opacity: float = 1.0,
) -> str:
    """A filled rectangle.

    Args:
      begin: where it begins, as a share of the width.
      end: where it ends.
      top: in pixels.
      height: in pixels.
      colour: what it means.
      title: what is shown when the pointer rests on it.
      opacity: of the colour.
    """
    told = f"<title>{html.escape(title)}</title>" if title else ""
    width = max(end - begin, 0.0)
    return (
        f'<rect x="{begin:.3%}" y="{top:g}" width="{width:.3%}" height="{height:g}" '
        f'fill="{colour.value}" style="fill:{colour.css}" opacity="{opacity:g}">'
        f"{told}</rect>"
    )


def cell(
    begin: float,
    end: float,
    top: float,
    height: float,
    colour: Colour,
    title: str,
    label: str,
) -> str:
    """A framed rectangle with text in it, faint enough for the text to be read.

    Args:
      begin: as of `box`.
      end: likewise.
      top: likewise.
      height: likewise.
      colour: likewise.
      title: likewise.
      label: in the middle; may be empty.
    """
    faint = box(begin, end, top, height, colour, title, opacity=0.25)
    frame = (
        f'<rect x="{begin:.3%}" y="{top:g}" width="{end - begin:.3%}" '
        f'height="{height:g}" fill="none" stroke="{colour.value}" '
        f'style="stroke:{colour.css}" stroke-width="2"/>'
    )
    if not label:
        return faint + frame
    text = letters(label, (begin + end) / 2, top + (height + LETTER) / 2 - 2, "middle")
    return faint + frame + text


def letters(text: str, at: float, bottom: float, anchor: str = "start") -> str:
    """Text in the page's colour.

    Args:
      text: one line.
      at: the place of the anchor, as a share of the width.
      bottom: the line on which the letters stand, in pixels.
      anchor: what is at the place: `"start"`, `"middle"` or `"end"` of the text.
    """
    return (
        f'<text x="{at:.3%}" y="{bottom:g}" text-anchor="{anchor}" '
        f'font-size="{LETTER}" fill="currentColor">{_with_code(text)}</text>'
    )


def _with_code(text: str) -> str:
    """Text of which some is code: SVG has another element for it than HTML."""
    opening = '<tspan font-family="monospace">'
    marked = _html_report.marked(text)
    return marked.replace("<code>", opening).replace("</code>", "</tspan>")


def line(
    begin: tuple[float, float], end: tuple[float, float], opacity: float = 0.5
) -> str:
    """A thin line in the page's colour, between two points: share of width, pixels."""
    return (
        f'<line x1="{begin[0]:.3%}" y1="{begin[1]:g}" x2="{end[0]:.3%}" '
        f'y2="{end[1]:g}" stroke="currentColor" opacity="{opacity:g}"/>'
    )
