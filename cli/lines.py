"""Text of others on one line of a terminal: what is printed holds no line break and moves no cursor."""

from __future__ import annotations

import json


def one_line(text: object) -> str:
    """Characters that cannot be printed are written as JSON writes them: JSON stays JSON, and what it was."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in str(text))
