"""The list of SGLang's names is complete and readable for scripts/check_engine_api."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from weightcached.engines.sglang import api

PACKAGE = Path(api.__file__).parent
USED = {(entry["module"], entry["name"].partition(".")[0]) for entry in api.USED}
MODULES = {entry["module"] for entry in api.USED}


def test_entries_are_plain_data() -> None:
    """Each says what, where, since when and why."""
    assert json.loads(json.dumps(api.USED)) == api.USED
    for entry in api.USED:
        assert set(entry) == {"module", "name", "parameters", "since", "until", "why"}
        assert entry["why"]


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_every_import_of_sglang_is_listed(path: Path) -> None:
    """What is imported from SGLang, inside functions only, is in `USED`."""
    tree = ast.parse(path.read_text())
    imported = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
        for alias in node.names
    ]
    at_once = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "")[:6] == "sglang"]

    assert not at_once
    assert [item for item in imported if item not in USED and ".".join(item) not in MODULES] == []
