"""The release as its user gets it: built, installed, and the README word for word in a folder of somebody else's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

NAMES = ("core", "sources", "producer", "worker", "writer", "index", "training", "tests")
"""Names that users give to folders and files of their own."""
LIBRARIES = ("redis", "numpy", "torch", "msgspec", "click", "pyarrow", "faiss", "starlette")
"""Files of a user that have the names of libraries: the command runs none of them."""
ORIGIN = """import atexit; atexit.register(lambda: "embq" in sys.modules and print(\
sys.modules["embq"].__file__, *sys.argv[:2], file=open(sys.prefix + "/origins", "a")))"""
"""Line of a .pth file: each Python process notes which embq it has imported, and what it ran."""
LAPTOP_BYTES = 350_000_000
STRANGERS = ("writer==1.28.0", "worker==2018.4.1")
"""Packages of the registry with names of embq's former packages. `producer` is there as source only, which would run
code of its own to be installed."""


def block(heading: str) -> str:
    """The first block of code below a heading of the README."""
    found = re.search(rf"^## {re.escape(heading)}\n.*?^```\w+\n(.*?)^```", README, re.M | re.S)
    assert found is not None, heading
    return found[1]


class Environment:
    """A virtual environment with the wheel."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def install(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """`pip install` into it."""
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "--python",
            str(self.bin / "python"),
        ]
        return subprocess.run([*pip, "install", *arguments], capture_output=True, text=True, check=False)

    def variables(self) -> dict[str, str]:
        """Variables of a user who has activated it, and whose browser shows nothing."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMBQ_", "PYTHON"))}
        return {**kept, "PATH": f"{self.bin}:{kept['PATH']}", "BROWSER": "true", "COLUMNS": "120"}

    def run(self, *command: str | Path, cwd: Path, stdin: str = "") -> str:
        """The output of a command that ends well."""
        words, env = list(map(str, command)), self.variables()
        done = subprocess.run(words, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def skip_where_it_is_not_there(done: subprocess.CompletedProcess[str]) -> None:
    """Skip where the registry knows no version at all, as without network; any other failure of pip is one."""
    if "(from versions: none)" in done.stderr:
        pytest.skip(f"the registry does not give it: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        assert all(one.isfile() or one.isdir() for one in members)
        tops = {one.name.split("/")[1] for one in members if "/" in one.name}
        archive.extractall(folder, filter="data")
    assert tops == {"embq", "README.md", "LICENSE", "PKG-INFO", "pyproject.toml", ".gitignore"}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*pip, *build, folder, str(sdist).removesuffix(".tar.gz")], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel in an environment that shares the other packages of the one that runs the tests."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    done = made.install("--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    (made.packages / "shared.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))
    (made.packages / "origin.pth").write_text(ORIGIN)
    return made


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which code of a user that is executed leaves its name; there is none at the end."""
    folder = tmp_path_factory.mktemp("marks")
    yield folder
    assert list(folder.iterdir()) == []


def trap(folder: Path, marks: Path, names: tuple[str, ...]) -> Path:
    """A folder with packages and modules of these names."""
    for at, name in enumerate(names):
        code = f"open({str(marks / name)!r}, 'w'); raise SystemExit('{name} of the current folder was executed')\n"
        path = folder / (f"{name}/__init__.py" if at % 2 == 0 else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, marks: Path) -> Path:
    """The folder in which the commands are called."""
    return trap(tmp_path_factory.mktemp("foreign"), marks, NAMES + LIBRARIES)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, marks: Path) -> Path:
    """The folder of a program that uses embq: Python itself would import its `redis.py`, so it has none."""
    folder = trap(tmp_path_factory.mktemp("program"), marks, NAMES)
    (folder / "words.txt").write_text("one\ntwo\n")
    return folder


@pytest.fixture(scope="module")
def searched(installed: Environment, foreign: Path) -> str:
    """The output of the README's first search, without the pages."""
    commands = re.sub(r"^embq (ui|atlas) .*\n", "", block("A first search in 60 seconds"), flags=re.M)
    return installed.run("bash", "-ec", commands, cwd=foreign)


@contextmanager
def server(installed: Environment, line: str, cwd: Path) -> Iterator[str]:
    """The URL of a server that a line of the README starts."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=cwd, env=installed.variables(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        said = ""
        while not (found := re.search(r"http://\S+", said)):
            more = process.stdout.readline()
            assert more, said
            said += more
        yield found[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def shown(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/html")
        return str(answer.read().decode())


def with_model(url: str) -> str:
    """The page once the model of its query is loaded; until then it asks again by itself."""
    until = time.monotonic() + 120
    while (page := shown(url)) and "The model is loading" in page and time.monotonic() < until:
        time.sleep(0.5)
    return page


def test_the_wheel_has_what_the_tree_has_and_one_command(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "embq"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    about = {name for name in names if re.match(r"embq-[^/]+\.dist-info/", name)}
    assert names - about == set(listed.split())
    assert scripts.split() == ["[console_scripts]", "embq", "=", "embq.app.cli:main"]


def test_a_release_has_the_version_of_its_tag(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "").removeprefix(".venv/bin/") for step in workflow["jobs"]["packages"]["steps"]]
    for name in ("embq", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for step in (step for step in steps if step.startswith("hatchling ")):
        for tag in ("v0.1.0", "v9.8.7"):
            subprocess.run(["bash", "-ec", step], cwd=tmp_path, env={**variables, "GITHUB_REF_NAME": tag}, check=True)
    built = {path.name for path in (tmp_path / "dist").iterdir()}
    assert built == {"embq-9.8.7.tar.gz", "embq-9.8.7-py3-none-any.whl"}
    with zipfile.ZipFile(tmp_path / "dist" / "embq-9.8.7-py3-none-any.whl") as wheel:
        assert '__version__ = "9.8.7"' in wheel.read("embq/__init__.py").decode()


def test_the_first_search_of_the_readme_gives_what_the_readme_shows(searched: str) -> None:
    answer = re.search(r"The answer.*?```text\n(.*?)```", README, re.S)
    assert answer is not None
    for line in answer[1].splitlines():
        rank, _, key, *_ = line.split()
        assert re.search(rf"^\s+{rank}\s+0\.\d+\s+{re.escape(key)}\s", searched, re.M), searched


@pytest.mark.parametrize("verb", ["ui", "atlas"])
def test_the_pages_of_the_readme_are_there(installed: Environment, foreign: Path, searched: str, verb: str) -> None:
    found = re.search(rf"^embq {verb} [^#\n]*", block("A first search in 60 seconds"), re.M)
    assert found is not None
    with server(installed, found[0], foreign) as url:
        base = re.match(r"http://[^/]+", url)
        assert base is not None
        for path in ("/", "/?q=read+a+zip+archive", "/?id=1"):
            assert 'class="result"' in with_model(base[0] + path)
        texts = len((foreign / "texts.jsonl").read_text().splitlines())
        assert f"{texts} of {texts}" in shown(base[0] + "/fleet")
        assert ("has no map yet" in shown(base[0] + "/map")) == (verb == "ui")


def test_every_process_of_the_run_has_imported_the_installed_package(installed: Environment, searched: str) -> None:
    noted = (installed.bin.parent / "origins").read_text()
    assert all(line.startswith(f"{installed.packages}/embq/__init__.py ") for line in noted.splitlines()), noted
    for started in ("/bin/embq run", "__main__.py producer", "__main__.py writer", "__main__.py worker", "process.py"):
        assert started in noted


def test_the_python_of_the_readme_runs(installed: Environment, program: Path, foreign: Path, searched: str) -> None:
    (program / "out").symlink_to(foreign / "out")
    (program / "block.py").write_text(block("From Python"))
    also = "embq.run('texts.jsonl', 'called', model='stub:4', devices='cpu').wait()\n"
    for printed in (
        installed.run("python", "block.py", cwd=program),
        installed.run("python", "-P", "-", cwd=foreign, stdin=block("From Python") + also),
    ):
        assert re.findall(r"^(\d) \d\.\d+ \w+\.", printed, re.M) == list("12345")


SPAWNED = """
import multiprocessing
import embq

def embed(text):
    return embq.embed([text], "stub:4").shape

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(embed, ["a", "b"]) == [(1, 4)] * 2
    assert embq.embed(["a"] * 40, "stub:4", device="cpu").shape == (40, 4)
    embq.run("words.txt", "spawned", model="stub:4", devices="cpu").wait()
    try:
        embq.embed([""], "stub:4")
    except embq.EmbqError as error:
        assert error.code == "not_embedded"
"""


@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]])
def test_programs_that_start_processes_run(installed: Environment, program: Path, start: list[str]) -> None:
    (program / "spawned.py").write_text(SPAWNED)
    installed.run("python", *start, "spawned.py", cwd=program)


def test_the_module_is_the_command(installed: Environment, foreign: Path) -> None:
    assert installed.run("python", "-m", "embq", "--version", cwd=foreign).startswith("embq, version ")


def test_two_processes_train(installed: Environment, foreign: Path) -> None:
    for at in range(16):
        picture = foreign / "pictures" / "ab"[at % 2] / f"{at}.jpg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (16 * at, 200 * (at % 2), 50)).save(picture)
    convert = ["convert", "pictures", "shards/train-%06d.tar", "--samples-per-shard=4"]
    installed.run("embq", "shards", *convert, cwd=foreign)
    tiny = ["--model=timm:test_resnet", "--image-size=32", "--batch-size=4", "--epochs=1", "--workers=1"]
    cpus = ["--device=cpu", "--num-devices=2", "--output=trained"]
    installed.run("embq", "train", "classify", "shards", *tiny, *cpus, cwd=foreign)
    assert (foreign / "trained" / "model.safetensors").exists()


def test_packages_of_the_old_names_change_nothing(
    installed: Environment, foreign: Path, program: Path, marks: Path, searched: str
) -> None:
    trap(installed.packages, marks, ("producer",))
    done = installed.install("--no-deps", "--only-binary", ":all:", *STRANGERS)
    skip_where_it_is_not_there(done)
    assert (installed.packages / "writer").is_dir()
    assert (installed.packages / "worker").is_dir()
    installed.run("embq", "run", "words.txt", "-o", "beside", "-m", "stub:4", "--devices", "cpu", cwd=program)
    assert "zipfile." in installed.run("embq", "search", "out", "read a zip archive", "-k", "3", cwd=foreign)


def test_the_install_of_a_laptop_plans(wheel: Path, tmp_path: Path, foreign: Path) -> None:
    laptop = Environment(tmp_path)
    skip_where_it_is_not_there(laptop.install("--constraint", ROOT / "constraints.txt", wheel))
    assert not {"numpy", "torch"} & {path.name for path in laptop.packages.iterdir()}
    assert sum(path.stat().st_size for path in laptop.packages.rglob("*")) <= LAPTOP_BYTES
    (foreign / "words.txt").write_text("one\ntwo\n")
    assert "Daily" in laptop.run("embq", "--help", cwd=foreign)
    assert laptop.run("embq", "--version", cwd=foreign).startswith("embq, version ")
    said = laptop.run("embq", "enqueue", "words.txt", "-o", "planned", "-m", "stub:4", "--dry-run", cwd=foreign)
    assert re.search(r"^rows\s+2,", said, re.M), said


def test_what_is_executed_in_such_a_folder_leaves_its_name(tmp_path: Path) -> None:
    """Plain Python runs these traps, so a folder of marks that stays empty says something."""
    (tmp_path / "marks").mkdir()
    folder = trap(tmp_path, tmp_path / "marks", NAMES + LIBRARIES)
    for name in NAMES + LIBRARIES:
        done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=folder, capture_output=True, check=False)
        assert done.returncode
    assert {path.name for path in (tmp_path / "marks").iterdir()} == {*NAMES, *LIBRARIES}
