"""Write stored results as JSON in which one row, a dict of numbers, strings and lists of them, is one line."""

import json
from pathlib import Path


def write_rows(file: Path, stored: dict) -> None:
    file.write_text(text(stored) + "\n")


def text(value, indent: str = "\n ") -> str:
    if flat(value) or (isinstance(value, dict) and all(map(flat, value.values()))):
        return json.dumps(value)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {text(part, indent + ' ')}" for key, part in value.items()]
    else:
        parts = [text(part, indent + " ") for part in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return start + indent + f",{indent}".join(parts) + indent[:-1] + end


def flat(value) -> bool:
    """Whether this is a number, a string, or a list of them."""
    parts = value if isinstance(value, list) else [value]
    return not any(isinstance(part, dict | list) for part in parts)
