"""A matplotlib figure as an SVG element for a page with a palette of its own.

Ids are prefixed with the figure's name, so that several figures share a page; colours become CSS variables with
the drawn colour as fallback; what would reach beyond the figure is taken out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"


def svg(figure: Figure, name: str, title: str, variables: Mapping[str, str]) -> str:
    """The figure as an `<svg>` element: ids prefixed with its name, colours as variables, as wide as its place."""
    file = io.StringIO()
    figure.savefig(
        file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # A <style> inside an inline SVG would apply to the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(key): _repaint(_local(key), text, name, variables) for key, text in element.attrib.items()
        }
    box = {"xmlns": SVG, "viewBox": root.attrib["viewBox"], "style": "stroke-linejoin: round"}
    root.attrib = {**box, "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _repaint(attribute: str, text: str, name: str, variables: Mapping[str, str]) -> str:
    if attribute == "id":
        return f"{name}-{text}"
    if attribute == "d":
        return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}", text).replace("\n", "")
    if attribute == "style":
        text = re.sub("#[0-9a-f]{6}", lambda c: variables.get(c[0], c[0]), text)
    return re.sub(r"^#|(?<=url\()#", f"#{name}-", text)
