"""`embq bench`: each experiment as a user starts it, with stub models, and what it leaves behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.session import await_in, ended, started, succeed

STUB = "stub:8?ms_per_sample=2"
SHORT = ["--seconds", "0.3", "--replicates", "2"]


@pytest.fixture(autouse=True)
def temporary(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the command's temporary files."""
    folder = short_tmp / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def texts(short_tmp: Path) -> Path:
    """A user's texts: two and three words."""
    (short_tmp / "texts.txt").write_text("one text\nand another one\n")
    return short_tmp / "texts.txt"


def figures_of(out: Path, name: str) -> dict[str, Any]:
    """The figures in a result file, whose picture must be there."""
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.json", f"{name}.png"]
    data = json.loads((out / f"{name}.json").read_text())
    assert data["benchmark"] == name
    assert data["versions"]["rq"]
    figures: dict[str, Any] = data["figures"]
    for condition in figures["conditions"]:
        assert len(condition["records"]) == condition["records_per_s"]["n"] == 2
        assert condition["failures"] == 0
        # A second at 2 ms is 500 records; a device is never faster than it says.
        assert (
            0 < condition["records_per_s"]["mean"] <= 501 * len(condition["devices"]) * condition["workers_per_device"]
        )
    return figures


@pytest.mark.slow
def test_workers_on_one_device(short_tmp: Path, temporary: Path, texts: Path) -> None:
    out = short_tmp / "out"
    options = ["-m", STUB, "--devices", "cpu", "--counts", "2", "--corpus-size", "86400000", "--texts", texts]
    stdout = succeed("bench", "workers", *options, *SHORT, "--output", out)
    assert stdout.splitlines()[0].split()[:2] == ["workers", "records/s"]
    (condition,) = figures_of(out, "workers")["conditions"]
    assert condition["workers_per_device"] == 2
    assert condition["memory_mb"]["mean"] > 10
    assert condition["days"]["mean"] == pytest.approx(1000 / condition["records_per_s"]["mean"], rel=0.01)
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_devices_alone_and_together(short_tmp: Path, temporary: Path, texts: Path) -> None:
    out = short_tmp / "out"
    options = ["-m", STUB, "--devices", "sim:1,sim:1", "--texts", texts, "--records", "256"]
    stdout = succeed("bench", "devices", *options, *SHORT, "--output", out, "--json")
    figures = figures_of(out, "devices")
    assert json.loads(stdout)["figures"] == figures
    alone, fleet = figures["conditions"]
    assert (alone["devices"], fleet["devices"]) == (["sim:1"], ["sim:1", "sim:1"])
    assert figures["sum_records_per_s"]["mean"] == pytest.approx(2 * alone["records_per_s"]["mean"], rel=1e-4)
    assert sum(one["share"]["mean"] for one in figures["shares"]) == pytest.approx(1)
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_units_of_several_sizes(short_tmp: Path, temporary: Path, texts: Path) -> None:
    out = short_tmp / "out"
    options = ["-m", STUB, "--devices", "cpu", "--sizes", "1,8", "--texts", texts, "--records", "64"]
    stdout = succeed("bench", "unit-size", *options, *SHORT, "--output", out)
    assert "days" not in stdout, "no corpus is named"
    conditions = figures_of(out, "unit-size")["conditions"]
    assert [(one["unit_size"], one["records"]) for one in conditions] == [(1, [64, 64]), (8, [64, 64])]
    assert {one["tokens_per_record"] for one in conditions} == {2.5}
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_an_experiment(short_tmp: Path, temporary: Path) -> None:
    status, stdout, stderr = ended(
        "bench", "workers", "-m", "stub:8?speed=9", "--counts", "1", "--output", short_tmp / "o"
    )
    assert (status, stdout) == (65, "")
    assert "error[model]: stub:8?speed=9: unknown parameter 'speed'" in stderr
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_an_interrupted_experiment_leaves_nothing_behind(short_tmp: Path, temporary: Path, texts: Path) -> None:
    options = ["-m", "stub:8?ms_per_sample=50", "--devices", "cpu", "--sizes", "64", "--records", "6400"]
    with started("bench", "unit-size", *options, "--texts", texts, "--output", short_tmp / "out") as running:
        await_in(running, lambda: list(temporary.glob("*/*/trace/*.jsonl")))
        processes = running.descendants()
        running.signal(signal.SIGINT)
        assert running.wait() == 130
        assert running.stderr.strip().endswith("interrupted")
        assert not [process for process in processes if process.is_running()]
    assert not list(temporary.iterdir())
    assert not list((short_tmp / "out").iterdir())
