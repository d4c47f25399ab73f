"""The plug-in of examples/, installed: it proves itself, and is used where it is enabled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

import embq
from embq.core.settings import child_environment

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed plug-in."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--no-index", "--target", folder, PLUGIN], check=True)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 texts; numbers 0 and 20 are nothing but a quotation."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.h5", "> quoted")


def write_texts(path: Path, of_0_and_20: str) -> Path:
    with h5py.File(path, "w") as file:
        file["text"] = [f"> quoted {n}\nwords of number {n}" if n % 20 else of_0_and_20 for n in range(40)]
    return path


def command(site: Path, *words: object, plugins: str = "embq-example") -> subprocess.CompletedProcess[str]:
    """A command of embq beside the plug-in."""
    environment = child_environment(PYTHONPATH=f"{site}:{PLUGIN.parents[1]}", EMBQ_PLUGINS=plugins)
    line = [sys.executable, "-m", "embq", *map(str, words)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=120)


def options(texts: Path, out: Path, *more: str) -> Sequence[object]:
    return ("run", texts, "-o", out, "-m", "letters:64", "--devices", "cpu", "--unit-size", "10", *more)


@pytest.fixture(scope="module")
def out(site: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all three of the plug-in."""
    out = tmp_path_factory.mktemp("run") / "out"
    done = command(site, *options(texts, out, "--map", "without-quotes"))
    assert done.returncode == 3, done.stderr
    assert "only_quotes" in done.stdout
    return out


def test_the_plug_in_keeps_the_promises_of_the_contract_suites(site: Path) -> None:
    environment = child_environment(PYTHONPATH=f"{site}:{PLUGIN.parents[1]}", EMBQ_PLUGINS="embq.example")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(PLUGIN), str(PLUGIN)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "23 passed" in done.stdout


def test_its_model_input_and_map_make_rows(site: Path, out: Path) -> None:
    rows = list(embq.open(out).rows())
    assert {row["key"] for row in rows} == {f"texts.h5:{n + 1}" for n in range(40) if n % 20}
    assert all("quoted" not in row["caption"] for row in rows)
    np.testing.assert_allclose([np.linalg.norm(row["embedding"].astype(float)) for row in rows], 1, atol=1e-3)
    failed = embq.open(out).failures()
    assert sorted(failed["key"].to_pylist()) == ["texts.h5:1", "texts.h5:21"]
    assert set(failed["code"].to_pylist()) == {"only_quotes"}


def test_whoever_reads_the_rows_needs_no_plug_in(site: Path, out: Path) -> None:
    verified = command(site, "verify", out, plugins="")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "4 units of kind hdf5, of a plug-in, were not compared with their inputs" in verified.stdout


@pytest.mark.parametrize(
    ("more", "plugins", "told"),
    [
        ((), "", "EMBQ_PLUGINS=embq-example enables it"),
        (("--map", "without-quotes"), "another", "EMBQ_PLUGINS=embq-example enables it"),
        (("--map", "nothing"), "embq-example", "maps that EMBQ_PLUGINS enables here: without-quotes"),
    ],
)
def test_what_is_not_enabled_is_not_used_and_the_message_tells_how(
    site: Path, texts: Path, tmp_path: Path, more: tuple[str, ...], plugins: str, told: str
) -> None:
    done = command(site, *options(texts, tmp_path / "out", *more), plugins=plugins)
    assert done.returncode in (2, 65)
    assert told in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_mended_file_is_retried_and_verified(site: Path, tmp_path: Path) -> None:
    mended, out = write_texts(tmp_path / "texts.h5", "> quoted"), tmp_path / "out"
    assert command(site, *options(mended, out, "--map", "without-quotes")).returncode == 3
    write_texts(mended, "longer than it was")
    retried = command(site, "retry", out)
    assert retried.returncode == 0, retried.stdout + retried.stderr
    verified = command(site, "verify", out)
    assert verified.returncode == 0, verified.stdout
    assert "not compared" not in verified.stdout
    write_texts(mended, "another text").touch()
    changed = command(site, "verify", out)
    assert changed.returncode == 65
    assert "source_changed" in changed.stdout


def test_a_dataset_of_images_makes_rows_of_images(site: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "photos.hdf5", "w") as file:
        images = file.create_dataset("photo", (3,), h5py.vlen_dtype(np.uint8))
        for n in range(3):
            images[n] = np.frombuffer(b"image %d" % n, np.uint8)
    more = ("--image-column", "photo", "--model", "stub:8", "--devices", "cpu")
    done = command(site, "run", tmp_path / "photos.hdf5", "-o", tmp_path / "out", *more)
    assert done.returncode == 0, done.stderr
    assert [row["key"] for row in embq.open(tmp_path / "out").rows()] == [f"photos.hdf5:{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_without_such_a_dataset_is_refused(site: Path, texts: Path, tmp_path: Path, damaged: bool) -> None:
    (tmp_path / "other.h5").write_bytes(texts.read_bytes()[: -100 if damaged else None])
    done = command(site, *options(tmp_path / "other.h5", tmp_path / "out", "--text-column", "words"))
    assert done.returncode == 65
    assert ("cannot be read" if damaged else "no dataset words with one dimension; it has text") in done.stderr


@pytest.mark.slow
def test_another_version_of_a_map_neither_goes_on_nor_retries(site: Path, texts: Path, out: Path) -> None:
    metadata = site / "embq_example-1.0.dist-info" / "METADATA"
    as_it_was = metadata.read_text()
    metadata.write_text(as_it_was.replace("Version: 1.0", "Version: 1.1"))
    try:
        other = command(site, *options(texts, out, "--map", "without-quotes"))
        assert other.returncode == 65
        assert "map: without-quotes embq-example==1.0 there, without-quotes embq-example==1.1 asked for" in other.stderr
        retried = command(site, "retry", out)
        assert retried.returncode == 3
        assert "map_unavailable" in retried.stdout
        assert "embq-example 1.1 is installed" in retried.stdout
    finally:
        metadata.write_text(as_it_was)
    assert set(embq.open(out).failures()["key"].to_pylist()) == {"texts.h5:1", "texts.h5:21"}
