"""Every message that docs/troubleshooting.md quotes is one that the code prints."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^(?:error|warning|  hint): (.*)$", PAGE, flags=re.M)
MIN_LENGTH = 10  # characters of a message that are not placeholders


def message_patterns():
    """Return a regular expression for each text of the source code, with its placeholders as wildcards."""
    patterns = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [text for piece in re.split(r"%[sd]", node.value) for text in (piece, None)][:-1]
            else:
                continue
            if sum(len(part or "") for part in parts) >= MIN_LENGTH:
                patterns.add("".join(".*" if part is None else re.escape(part.strip("\n")) for part in parts))
    return [re.compile(pattern) for pattern in patterns]


@pytest.fixture(scope="module")
def patterns():
    return message_patterns()


def test_page_quotes_messages():
    assert len(QUOTED) > 20


@pytest.mark.parametrize("message", QUOTED)
def test_message_is_in_the_source(message, patterns):
    matches = [match.group() for pattern in patterns if (match := pattern.search(message))]
    assert max(map(len, matches), default=0) >= len(message) / 2
