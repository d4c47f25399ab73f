"""The systemd units: what they start exists, what they set is known, and none of them has more rights than it needs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from embq.app.cli.entry_point import cli
from embq.core.errors import Exit

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
VERBS = ["producer", "serve", "worker", "writer"]
SETTINGS = set(
    re.findall(r"EMBQ_[A-Z]+(?:_[A-Z]+)*", (ROOT / "embq" / "core" / "settings.py").read_text(encoding="utf-8"))
)
OF_OTHERS = {"HF_HOME", "HF_HUB_OFFLINE", "XDG_STATE_HOME", "XDG_CACHE_HOME"}

HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "RestrictSUIDSGID": "yes",
    "User": "embq",
}


def section(unit: Path, name: str) -> dict[str, list[str]]:
    """Each option of a section with its values, in order; unlike configparser this keeps those that are repeated."""
    found: dict[str, list[str]] = {}
    at = ""
    for line in unit.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            at = line.strip("[]")
        elif at == name and line and not line.startswith("#"):
            option, _, value = line.partition("=")
            found.setdefault(option, []).append(value)
    return found


def environment(unit: Path) -> dict[str, str]:
    values = [pair for value in section(unit, "Service").get("Environment", []) for pair in shlex.split(value)]
    return dict(pair.split("=", 1) for pair in values)


def command(unit: Path) -> list[str]:
    (line,) = section(unit, "Service")["ExecStart"]
    return shlex.split(line)


def test_runs_are_written_where_the_units_may_write_and_nowhere_else() -> None:
    lines = (FOLDER / "environment").read_text(encoding="utf-8").splitlines()
    said = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for verb in ("producer", "writer"):
        (allowed,) = section(FOLDER / f"embq-{verb}.service", "Service")["ReadWritePaths"]
        assert said["EMBQ_OUTPUTS"] == allowed
    assert said["EMBQ_OUTPUTS"] in said["EMBQ_ROOTS"].split(":")


def test_there_is_a_unit_for_each_service() -> None:
    assert [unit.stem for unit in UNITS] == [f"embq-{verb}" for verb in VERBS]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_a_unit_starts_is_understood_by_embq(unit: Path) -> None:
    program, verb, *arguments = command(unit)
    assert program == "/opt/embq/bin/embq"
    assert verb == unit.stem.removeprefix("embq-")
    found = cli.get_command(click.Context(cli), verb)
    assert found is not None
    found.make_context(verb, list(arguments))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_a_unit_sets_is_a_setting_and_no_password_stands_in_it(unit: Path) -> None:
    said = environment(unit)
    assert set(said) <= SETTINGS | OF_OTHERS
    if unit.stem == "embq-serve":
        assert "EMBQ_BROKER_URL" not in said
        return
    role = "worker" if unit.stem == "embq-worker" else "writer"
    assert said["EMBQ_BROKER_URL"] == f"redis://{role}@127.0.0.1:6379"
    assert section(unit, "Service")["LoadCredential"] == [f"password:/etc/embq/secrets/{role}/password"]
    assert said["EMBQ_BROKER_PASSWORD_FILE"] == "%d/password"


def test_the_example_of_the_environment_has_settings_only() -> None:
    lines = (FOLDER / "environment").read_text(encoding="utf-8").splitlines()
    named = {line.lstrip("#").partition("=")[0] for line in lines if re.match(r"#?[A-Z_]+=", line)}
    assert named
    assert named <= SETTINGS | OF_OTHERS


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_has_no_more_rights_than_it_needs(unit: Path) -> None:
    service = section(unit, "Service")
    assert {option: service[option] for option in HARDENED} == {option: [value] for option, value in HARDENED.items()}
    writes = {"embq-serve": None, "embq-worker": ["-/srv/embq/out"]}.get(unit.stem, ["/srv/embq/out"])
    assert service.get("ReadWritePaths") == writes


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_started_again_unless_that_cannot_help(unit: Path) -> None:
    service = section(unit, "Service")
    assert service["Restart"] == ["on-failure"]
    never = {Exit.USAGE, Exit.BAD_INPUT, Exit.CONFIG}
    assert {int(status) for status in service["RestartPreventExitStatus"][0].split()} == never
    assert section(unit, "Unit")["StartLimitIntervalSec"] == ["0"]


def test_a_worker_has_time_to_finish_what_it_has_begun() -> None:
    worker = FOLDER / "embq-worker.service"
    found = cli.get_command(click.Context(cli), "worker")
    assert found is not None
    drain_s = next(option.default for option in found.params if option.name == "drain_timeout")
    assert isinstance(drain_s, float)
    assert int(section(worker, "Service")["TimeoutStopSec"][0]) >= drain_s + 20
    assert section(worker, "Service")["KillMode"] == ["mixed"]


def test_two_services_of_a_machine_do_not_listen_on_one_port() -> None:
    ports = [words[words.index("--metrics") + 1] for words in map(command, UNITS) if "--metrics" in words]
    assert len(set(ports)) == len(ports) == 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    there = shutil.which("true")
    assert there is not None
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("/opt/embq/bin/embq", there)
        (tmp_path / unit.name).write_text(text)
    paths = [str(tmp_path / unit.name) for unit in UNITS]
    verify = ["systemd-analyze", "verify", "--man=no", *paths]
    done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    about_us = [line for line in done.stderr.splitlines() if "embq" in line]
    assert (done.returncode, about_us) == (0, []), done.stderr
    spoilt = tmp_path / "embq-writer.service"
    spoilt.write_text(spoilt.read_text().replace("ProtectSystem=strict", "ProtectSytem=strict"))
    done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    assert "ProtectSytem" in done.stderr
