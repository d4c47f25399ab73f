"""Settings: the environment, once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import embq
from embq.app.cli.entry_point import run, warn_of_settings
from embq.app.doctor.machine_checks import unknown_names
from embq.core.errors import ConfigError
from embq.core.networks import Address
from embq.core.process.children import python
from embq.core.settings import MEANINGS, OF_DEPLOYMENTS, Settings, child_environment, unknown_settings


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("EMBQ_"):
            monkeypatch.delenv(name)


def test_names_that_are_no_settings_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*MEANINGS, *OF_DEPLOYMENTS):
        if name.startswith("EMBQ_"):
            monkeypatch.setenv(name, "")
    assert unknown_settings() == {}
    for name in MEANINGS:
        if name.startswith("EMBQ_"):
            monkeypatch.setenv(f"{name}X", "1")
    assert unknown_settings() == {f"{name}X": name for name in sorted(MEANINGS) if name.startswith("EMBQ_")}
    monkeypatch.setenv("EMBQ_" + "Q" * 1000, "1")
    assert run(["config"]) == 0
    assert "warning: EMBQ_BROKER_URLX is not a setting; did you mean EMBQ_BROKER_URL?" in capsys.readouterr().err
    assert [check.state for check in unknown_names()] == ["warn"] * len(unknown_settings())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EMBQ_BROKER", "EMBQ_BROKER_URL"),
        ("EMBQ_BROKERURL", "EMBQ_BROKER_URL"),
        ("EMBQ_ALLOW_HOST", "EMBQ_ALLOW_HOSTS"),
        ("EMBQ_INDEX", "EMBQ_INDEX_CACHE_GB"),
        ("EMBQ_PLUGIN", "EMBQ_PLUGINS"),
        *((name, "") for name in ("EMBQ_TEST_SEED", "EMBQ_TEST_CLOCK", "EMBQ_SABOTAGE", "EMBQ_READERS_PYTHON")),
        *((name, "") for name in ("EMBQ_TORCH_INDEX", "EMBQ_BROKER_BIND", "EMBQ_OUT", "EMBQ_FLEET")),
    ],
)
def test_a_name_that_is_like_a_setting_is_warned_of_by_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    expected = f"warning: {name} is not a setting; did you mean {meant}?\n" if meant else ""
    for verb in ("run", "status", "search", "worker"):
        warn_of_settings([verb, "x"])
        assert capsys.readouterr().err == expected
    for arguments in (["run", "--quiet"], ["run", "-q"], ["run", "--help"], ["config"], ["--version"], []):
        warn_of_settings(arguments)
        assert capsys.readouterr().err == ""


def test_processes_that_embq_starts_do_not_warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_BROKER", "x")
    run_of = {"capture_output": True, "text": True, "check": False}
    ours = subprocess.run(python("-m", "embq", "gc", "/nowhere"), **run_of)
    users = subprocess.run([sys.executable, "-m", "embq", "gc", "/nowhere"], **run_of)
    assert [done.stderr.count("EMBQ_BROKER is not a setting") for done in (ours, users)] == [0, 1]


def test_plugins_that_are_not_installed_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBQ_PLUGINS", "nosuchpkg")
    warn_of_settings(["run"])
    assert "EMBQ_PLUGINS names nosuchpkg, which is not installed" in capsys.readouterr().err
    assert [(check.state, "nosuchpkg" in check.detail) for check in unknown_names()] == [("warn", True)]


BAD_VALUES = {
    **{f"EMBQ_{name}_S": "x" for name in ("LEASE", "BEAT", "STALL", "SLICE", "COMPILE")},
    **{f"EMBQ_{name}_CACHE_GB": "x" for name in ("INDEX", "THUMBNAIL")},
    **{f"EMBQ_{name}_HOSTS": "a/b" for name in ("PRIVATE", "ALLOW")},
    **{f"EMBQ_BROKER_{name}": "/nowhere/x" for name in ("PASSWORD_FILE", "CA")},
    "EMBQ_METRICS": "x",
    "EMBQ_LOG": "jsn",
    "EMBQ_PLAIN_BROKER": "maybe",
}
"""Setting -> a value that cannot be used; the others are texts, names of folders and lists of them."""

FREE = {"BROKER_URL", "FLEET_NAME", "MACHINE", "ROOTS", "OUTPUTS", "STAGING", "SPOOL", "PLUGINS", "TRACE"}


@pytest.mark.parametrize("name", [name for name in MEANINGS if name.startswith("EMBQ_") and name[5:] not in FREE])
def test_every_verb_refuses_a_value_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, BAD_VALUES[name])
    (tmp_path / "t.txt").write_text("a\n")
    out = str(tmp_path / "out")
    for arguments in (["run", str(tmp_path / "t.txt"), "-o", out, "-m", "stub:4"], ["status"], ["search", out, "a"]):
        assert run(arguments) == 78
        assert name in capsys.readouterr().err
    assert not Path(out).exists()


def test_without_variables_the_defaults_hold() -> None:
    settings = Settings.from_environment()
    assert settings == Settings()
    assert settings.lease_s > 3 * settings.beat_s, "one lost beat must not free a unit"


def test_every_variable_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("se cret\n")
    monkeypatch.setenv("EMBQ_BROKER_URL", "redis://h:1")
    monkeypatch.setenv("EMBQ_BROKER_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("EMBQ_LEASE_S", "2.5")
    monkeypatch.setenv("EMBQ_BEAT_S", "0.5")
    monkeypatch.setenv("EMBQ_STALL_S", "7")
    monkeypatch.setenv("EMBQ_SLICE_S", "9")
    monkeypatch.setenv("EMBQ_METRICS", "[::1]:9101")
    monkeypatch.setenv("EMBQ_ROOTS", f"/a{os.pathsep}/b{os.pathsep}")
    assert Settings.from_environment() == Settings(
        broker_url="redis://h:1",
        broker_password="se cret",
        lease_s=2.5,
        beat_s=0.5,
        stall_s=7.0,
        slice_s=9.0,
        metrics=Address(host="::1", port=9101),
        roots=("/a", "/b"),
    )


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", ["EMBQ_LEASE_S", "EMBQ_BEAT_S", "EMBQ_STALL_S", "EMBQ_SLICE_S"])
def test_a_number_of_seconds_that_is_none_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=name):
        Settings.from_environment()


def test_a_password_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_BROKER_PASSWORD_FILE", "/nowhere/password")
    with pytest.raises(ConfigError, match="/nowhere/password"):
        Settings.from_environment()


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().lease_s = 1.0  # type: ignore[misc]


def test_a_childs_environment_is_ours_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_ROOTS", "/a")
    child = child_environment(EMBQ_ROOTS="/b", EMBQ_BROKER_URL="redis://x")
    assert (child["EMBQ_ROOTS"], child["EMBQ_BROKER_URL"]) == ("/b", "redis://x")
    assert os.environ["EMBQ_ROOTS"] == "/a"


def test_no_other_file_of_these_packages_reads_the_environment() -> None:
    root = Path(embq.__file__).parent
    packages = ("core", "sources", "producer", "writer")
    files = [file for package in packages for file in (root / package).rglob("*.py")]
    readers = [str(file.relative_to(root)) for file in files if re.search(r"os\.(environ|getenv)", file.read_text())]
    assert [name for name in readers if name != "core/settings.py"] == []
