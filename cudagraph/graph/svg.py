"""Elements of SVG pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

#: Average width of a character of a label, in pixels.
CHARACTER_WIDTH = 6.6


def document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Return an SVG picture of the elements `parts`, with a title in its upper left corner."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="24" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, content: str, anchor: str = "start", weight: str = "normal") -> str:
    """Return a line of text. `anchor` says whether its "start", "middle" or "end" is at `x`."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(content)}</text>"
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    label: str,
    colours: tuple[str, str],
    hover: str = "",
) -> str:
    """Return a box with fill and stroke colours. Viewers show `hover` when the pointer is over it.

    The label is in the middle of the box. If it does not fit, it is shortened with "…", or omitted
    if less than three of its characters fit.
    """
    fill, stroke = colours
    available = int((width - 6) / CHARACTER_WIDTH)
    if len(label) > available:
        label = label[: available - 1] + "…" if available > 3 else ""
    title = f"<title>{escape(hover)}</title>" if hover else ""
    caption = text(x + width / 2, y + height / 2 + 4, label, "middle") if label else ""
    return (
        f'<g>{title}<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}" rx="{min(4, width / 4):.2f}" fill="{fill}" stroke="{stroke}"/>'
        f"{caption}</g>"
    )
