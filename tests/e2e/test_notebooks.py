"""The notebooks in examples/notebooks/ run as they are, from an empty folder, and are committed with outputs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST = {
    "dataframe_to_database": r"(\d+) rows in the database, \1 in the run\n",
    "first_embeddings": r"best of each: zipfile\.\w+, threading\.\w+, statistics\.median\w*\n",
    "train_embed_search": r"(4[0-8]) of 48 nearest rows show the photograph of the query\n",
    "unequal_devices": r"3 experiments, 0 failures\n",
}
"""Notebook -> what the last line of its last cell matches."""
MOST_BYTES = 300_000
PRIVATE = re.compile(r"/(?:work|tmp|root|home)/|\.venv")
"""What tells where a notebook ran."""


def cells_of(notebook: Any) -> list[Any]:
    """The cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: Any) -> str:
    """What a cell wrote to stdout."""
    parts = [output["text"] for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join("".join(part) for part in parts)


def errors_of(notebook: Any) -> list[Any]:
    """The outputs that are errors."""
    return [one for cell in cells_of(notebook) for one in cell["outputs"] if one["output_type"] == "error"]


@pytest.fixture
def kernels(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel `python3` of this very Python, whatever the user has installed, without the user's settings."""
    folder = short_tmp / "jupyter"
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    (folder / "kernels" / "python3").mkdir(parents=True)
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    environment = {
        "JUPYTER_PATH": str(folder),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])),
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST)
def test_a_notebook_runs_from_an_empty_folder(name: str, short_tmp: Path, kernels: None) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if name == "dataframe_to_database":
        pytest.importorskip("lancedb")
    import nbformat

    folder = short_tmp / "empty"
    folder.mkdir()
    notebook = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    for cell in cells_of(notebook):
        cell["outputs"] = []
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    assert not errors_of(notebook)
    assert re.search(LAST[name] + r"\Z", printed(cells_of(notebook)[-1]))
    assert [path.name for path in folder.iterdir()] == [name.replace("_", "-")]


@pytest.mark.parametrize("name", LAST)
def test_a_notebook_is_committed_as_it_ran(name: str) -> None:
    """With outputs, in order, without an error, and without a trace of the machine."""
    text = (EXAMPLES / "notebooks" / f"{name}.ipynb").read_text()
    notebook = json.loads(text)
    cells = cells_of(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not errors_of(notebook)
    assert re.search(LAST[name] + r"\Z", printed(cells[-1]))
    assert set(notebook["metadata"]) == {"kernelspec"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not any(cell["metadata"] for cell in notebook["cells"])
    assert not PRIVATE.search(text)
    assert len(text.encode()) < MOST_BYTES


def test_every_notebook_is_in_the_readme_and_run_here() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    names = {path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb")}
    assert names == set(LAST)
    assert all(f"`notebooks/{name}.ipynb`" in readme for name in names)
