"""Requirements of extras of pyproject.toml, as a list for pip: `python deploy/requirements.py worker serve`.

An image installs these before it copies the sources, so that a change of the sources builds in seconds.

`python deploy/requirements.py --hashes` (`make hashes`) writes deploy/hashes.txt: version and SHA-256 of each wheel
that pip takes from PyPI for the images, on x86_64 and on ARM. It has no addresses, so any mirror will do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ["broker", "gcs", "http", "index", "index-gpu", "int8", "minilm", "s3", "serve", "worker", "writer"]
"""Of all images."""
BUILD = ["cmake", "hatchling", "ninja", "scikit-build-core"]
"""What the two wheels of the project are built with."""
DEBIAN = ["async-timeout"]
"""What redis asks for before Python 3.11.3, such as Debian's own: pip resolves for the Python that runs it."""
ON_NO_ARM = {"index-gpu"}
"""faiss-gpu has no wheels for it."""
PLATFORM = {"python-version": "3.11", "implementation": "cp", "only-binary": ":all:"}
MANYLINUX = [*(f"_2_{minor}" for minor in range(36, 16, -1)), "2014"]
"""The newest first, from that of Debian bookworm."""


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the project and of `extras`; KeyError names an extra that there is not."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    of_extras = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *of_extras]


def resolved(machine: str) -> list[dict[str, Any]]:
    """The wheels that pip would install on `machine` with the versions of constraints.txt, of its installation report.

    pip's own settings do not count: a wheel that was built here has a hash that nobody else's has.
    """
    extras = [extra for extra in EXTRAS if machine == "x86_64" or extra not in ON_NO_ARM]
    options = [f"--{name}={value}" for name, value in PLATFORM.items()]
    options += [f"--platform=manylinux{version}_{machine}" for version in MANYLINUX]
    settings = {name: value for name, value in os.environ.items() if name == "PIP_CERT" or not name.startswith("PIP_")}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report=-"]
        command += [f"--target={folder}", f"--constraint={ROOT / 'constraints.txt'}", *options]
        command += [*requirements(ROOT / "pyproject.toml", extras), *BUILD, *DEBIAN]
        done = subprocess.run(
            command, env={**settings, "PIP_CONFIG_FILE": os.devnull}, stdout=subprocess.PIPE, check=True
        )
    return list(json.loads(done.stdout)["install"])


def write_hashes(path: Path) -> None:
    """Write `name==version --hash=sha256:...` for each package; CalledProcessError if pip finds no solution."""
    if sys.version_info[:2] != (3, 11):
        sys.exit("hashes.txt is for the Python of the images: run this with Python 3.11")
    found: dict[str, set[str]] = {}
    with ThreadPoolExecutor() as machines:
        wheels = [wheel for report in machines.map(resolved, ("x86_64", "aarch64")) for wheel in report]
    for wheel in wheels:
        pin = f"{wheel['metadata']['name']}=={wheel['metadata']['version']}"
        found.setdefault(pin, set()).add(wheel["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = [" ".join([pin, *(f"--hash=sha256:{value}" for value in sorted(found[pin]))]) for pin in found]
    text = "\n".join(["# Written by `make hashes`, from constraints.txt.", *sorted(lines, key=str.lower), ""])
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--hashes"]:
        write_hashes(ROOT / "deploy" / "hashes.txt")
    else:
        sys.stdout.writelines(f"{line}\n" for line in requirements(ROOT / "pyproject.toml", sys.argv[1:]))
