"""A hook of mkdocs: numbers in tables stay beside their units, and the ends of a range beside each other."""

from __future__ import annotations

import re

CELL = re.compile(r'(?<=<td style="text-align: right;">).*?(?=</td>)')
APART = re.compile(r" (?=[%…±]|(?:ms|s|GB|MB|GiB|MiB)\b)|(?<=[…±]) ")


def on_page_content(html: str, **_: object) -> str:
    return CELL.sub(lambda cell: APART.sub("&nbsp;", cell[0]), html)
