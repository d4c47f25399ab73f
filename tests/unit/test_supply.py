"""What is fetched to build, test and publish embq: by digest or exact version, and without credentials left behind."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FIXED = {
    "aiohttp": ("3.13.3", "CVE-2025-53643, CVE-2025-69223"),
    "anyio": ("4.4", "a race in its worker threads"),
    "cryptography": ("46.0.5", "CVE-2024-12797, CVE-2026-26007"),
    "h11": ("0.16", "CVE-2025-43859"),
    "jinja2": ("3.1.6", "CVE-2024-56326, CVE-2025-27516"),
    "matplotlib": ("3.11", "evaluates settings of the current folder"),
    "pillow": ("13", "CVE-2023-50447, CVE-2024-28219, CVE-2025-48379"),
    "pyarrow": ("23.0.1", "CVE-2023-47248, CVE-2026-25087"),
    "starlette": ("1.0", "CVE-2025-54121, CVE-2025-62727"),
    "torch": ("2.6", "CVE-2025-32434"),
}
"""Packages -> the first version without a known hole that embq could meet, and the holes of earlier ones."""


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_fetch_what_is_pinned_and_keep_no_credentials(path: Path) -> None:
    for step in steps(path):
        uses, run = step.get("uses", ""), step.get("run", "")
        assert not uses or re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", uses), uses
        if uses.startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        for line in run.splitlines():
            if "pipx run" in line or "pip install" in line:
                assert re.search(r"pipx run [\w-]+==[\d.]+ |--constraint constraints\.txt", line), line


def test_images_of_a_release_stand_on_a_base_by_digest() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    (base,) = [step for step in jobs["packages"]["steps"] if step.get("id") == "base"]
    assert "deploy/pin.sh" in base["run"]
    assert "grep '@sha256:'" in base["run"]
    (build,) = [step for step in jobs["images"]["steps"] if "docker/build-push-action@" in step.get("uses", "")]
    assert "PYTHON_IMAGE=${{ needs.packages.outputs.python-image }}" in build["with"]["build-args"].splitlines()


def test_no_version_with_a_known_hole_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    allowed: dict[str, list[Version]] = {}
    for requirement in map(Requirement, lines):
        least = [Version(one.version) for one in requirement.specifier if one.operator in (">=", "==")]
        allowed.setdefault(requirement.name, []).extend(least)
    for name, (first, holes) in FIXED.items():
        assert allowed[name], name
        assert min(allowed[name]) >= Version(first), (name, holes)
