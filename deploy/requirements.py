"""What pyproject.toml asks for, as a list for pip: `python deploy/requirements.py worker serve`.

An image installs these before it copies the sources, so that a change of the sources builds in seconds.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the project and of `extras`; KeyError names an extra that there is not."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    of_extras = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *of_extras]


if __name__ == "__main__":
    found = requirements(Path(__file__).resolve().parent.parent / "pyproject.toml", sys.argv[1:])
    sys.stdout.writelines(f"{line}\n" for line in found)
