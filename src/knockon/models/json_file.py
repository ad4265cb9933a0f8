"""JSON files that publishers wrote: an object, or a refusal that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from knockon.errors import Refused


def read_json_object(file: Path) -> dict[str, Any]:
    """The object that a UTF-8 JSON file holds.

    Raises:
        Refused: a file that cannot be read, text that is no JSON (or nested beyond reading, or with
            numbers beyond it), or another value than an object.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(str(file), str(error), "a JSON object") from error
    if not isinstance(content, dict):
        raise Refused(str(file), type(content).__name__, "a JSON object")
    return content
