"""What embq refuses of its peers' cases is one list, with reasons, and each suite ends as a line of a table."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import embq

REFUSED = tomllib.loads((Path(__file__).parent / "refused.toml").read_text())
"""Suite -> pattern of the whole name of a case -> why embq refuses it."""
SUITES = {
    "tests/peers/test_sentence_transformers.py": "sentence_transformers",
    "tests/peers/test_autofaiss.py": "autofaiss",
    "tests/peers/test_clients.py": "clients",
    "tests/unit/test_clip_retrieval.py": "clip_retrieval",
    "tests/e2e/test_clip_retrieval_names.py": "clip_retrieval",
}
collect_ignore_glob = [] if Path(sys.prefix).name == ".venv-peers" else ["test_*.py"]


def _suite(nodeid: str) -> str:
    """Suite of a test; "" for one of no suite."""
    return SUITES.get(nodeid.partition("::")[0], "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expect an error of embq of each case on the list: another error is red, and so is a case that passes."""
    used: set[tuple[str, str]] = set()
    for item in items:
        suite = _suite(item.nodeid)
        for pattern, reason in REFUSED.get(suite, {}).items():
            if re.fullmatch(pattern, item.name):
                used.add((suite, pattern))
                item.add_marker(pytest.mark.xfail(strict=True, raises=embq.EmbqError, reason=reason))
    suites = {_suite(item.nodeid) for item in items}
    listed = {(suite, pattern) for suite in suites for pattern in REFUSED.get(suite, {})}
    if (left := listed - used) and not config.getoption("keyword") and not any("::" in one for one in config.args):
        raise pytest.UsageError(f"tests/peers/refused.toml names cases that do not exist: {sorted(left)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each suite with its cases, and how they ended."""
    if collect_ignore_glob:
        return
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "xfailed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if suite := _suite(report.nodeid):
                client = report.nodeid.partition("[")[2].partition(":")[0]
                counts.setdefault(client if suite == "clients" else suite, Counter())[outcome] += 1
    terminalreporter.section("peers")
    for suite, of in sorted(counts.items()):
        terminalreporter.write_line(
            f"{suite:40} {of.total():4} cases: {of['passed']:4} passed, {of['xfailed']:3} refused by name, "
            f"{of['skipped']} skipped, {of['failed'] + of['error']} failed"
        )
