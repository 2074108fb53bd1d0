"""What README shows newcomers, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def first_request() -> bytes:
    """The body of its first `curl`, which asks for a chat."""
    found = re.search(r"curl http://127\.0\.0\.1:8000/v1/chat/completions .*? -d '(\{.*?\})'", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1].encode()
