"""Docstrings on the documentation site: lines that are laid out in columns keep them. An extension of griffe."""

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"(?:^ *\S.*?\S {2,}\S.*\n?(?:^ {4,}\S.*\n?)*){2,}", re.M)


class KeepColumns(griffe.Extension):
    """Fences two and more lines in a row whose words stand in columns."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and "```" not in obj.docstring.value:
            fenced = lambda match: f"\n```text\n{match[0].rstrip()}\n```\n"
            obj.docstring.value = COLUMNS.sub(fenced, obj.docstring.value)
