"""Values written on a command line."""

from __future__ import annotations

import ast
import json
from typing import Any


def read_value(text: str) -> Any:
    """What ``text`` means: JSON (``true``, ``3e-4``, ``[1, 2]``), a Python literal (``True``, ``None``), else a text.

    Example:
        >>> [read_value(text) for text in ("3e-4", "True", "null", "TokenCopy")]
        [0.0003, True, None, 'TokenCopy']
    """
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text
