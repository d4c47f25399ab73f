"""`embq logs`, `config` and `completion`, --no-color, and the dry run of `embq run`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from embq.app.cli.entry_point import cli, run
from embq.core.errors import Exit
from embq.core.settings import Settings
from tests.support.outputs.build import build, write_jsonl

EMBQ = str(Path(sys.executable).with_name("embq"))
TEXTS = [{"text": f"text {number}"} for number in range(4)]
COLOR = re.compile(r"\x1b\[[0-9;]*3[0-7]")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    return build(tmp_path / "out", [source])


def log(out: Path, service: str, *lines: str) -> None:
    (out / "_logs").mkdir(exist_ok=True)
    with open(out / "_logs" / f"{service}.log", "a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


# --- logs ---


def test_logs_of_all_services_are_in_the_order_of_time(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(out, "writer", "2026-01-01T00:00:02Z info writer b", "Traceback:", "2026-01-01T00:00:04Z info writer d")
    log(out, "worker", "2026-01-01T00:00:01Z info worker a", "2026-01-01T00:00:03Z info worker c")
    assert run(["logs", str(out)]) == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["a", "b", "Traceback:", "c", "d"]
    assert run(["logs", str(out), "--service", "writer", "-n", "1"]) == Exit.DONE
    assert capsys.readouterr().out == "2026-01-01T00:00:04Z info writer d\n"


def test_control_characters_and_secrets_of_a_log_do_not_reach_the_terminal(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(out, "worker", "\x1b[2J redis://user:secret@box")
    assert run(["logs", str(out)]) == Exit.DONE
    assert capsys.readouterr().out == "\\x1b[2J redis://user:****@box\n"


def test_a_log_that_is_a_link_is_not_read(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text("of somebody else\n")
    (out / "_logs").mkdir()
    (out / "_logs" / "worker.log").symlink_to(tmp_path / "other")
    assert run(["logs", str(out)]) != Exit.DONE
    assert "somebody" not in capsys.readouterr().out


def test_a_run_without_logs_says_where_they_are(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", str(out)]) == Exit.BAD_INPUT
    assert "has no log of" in capsys.readouterr().err


def test_logs_are_followed(out: Path) -> None:
    log(out, "writer", "first")
    with subprocess.Popen([EMBQ, "logs", str(out), "-f"], stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        log(out, "worker", "of a service that starts later")
        assert following.stdout.readline() == "of a service that starts later\n"
        following.terminate()


# --- config ---


def test_config_shows_values_sources_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_URL", "redis://worker:secret@box:6379")
    monkeypatch.delenv("EMBQ_LEASE_S", raising=False)
    assert run(["config", "--json"]) == Exit.DONE
    told = capsys.readouterr().out
    assert "secret" not in told
    rows = {row["name"]: (row["value"], row["source"]) for row in json.loads(told)["settings"]}
    assert rows["EMBQ_BROKER_URL"] == ("redis://worker:****@box:6379", "environment")
    assert rows["EMBQ_LEASE_S"] == (f"{Settings().lease_s:g}", "default")
    source = Path(sys.modules[Settings.__module__].__file__ or "").read_text(encoding="utf-8")
    assert {name for name in rows if name.startswith("EMBQ_")} == set(re.findall(r"\bEMBQ_[A-Z_]*[A-Z]\b", source))
    assert run(["config"]) == Exit.DONE
    assert "secret" not in capsys.readouterr().out


def test_config_refuses_a_value_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_PLAIN_BROKER", "perhaps")
    assert run(["config"]) == Exit.CONFIG


# --- completion, color, dry run ---


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == Exit.DONE
    assert "_EMBQ_COMPLETE" in capsys.readouterr().out


def test_models_are_completed_by_family_and_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "modules.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    for typed, offered in (("", ["minilm", "st:", "hf:", "open_clip:", "stub:", "st:./mine"]), ("m", ["minilm"])):
        completion = BashComplete(cli, {}, "embq", "_EMBQ_COMPLETE")
        found = completion.get_completions(["run", "texts", "-m"], typed)
        assert [one.value for one in found] == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [("stat", {"status"}), ("bench uni", {"unit-size"}), ("export --output-f", {"--output-format"}), ("zzz", set())],
)
def test_bash_completes_verbs_and_options(words: str, wanted: set[str]) -> None:
    script = (
        f'eval "$({EMBQ} completion bash)"; COMP_WORDS=({EMBQ} {words}); COMP_CWORD={len(words.split())}; '
        f'_embq_completion {EMBQ}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted


def test_no_color_prints_none(out: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    colored = kept | {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = [
        subprocess.run([EMBQ, *line], env=environment, capture_output=True, text=True, check=True).stdout
        for line, environment in (
            (["status", str(out)], colored),
            (["status", str(out), "--no-color"], colored),
            (["--no-color", "status", str(out)], colored),
            (["status", str(out)], colored | {"NO_COLOR": "1"}),
        )
    ]
    assert [COLOR.search(text) is not None for text in shown] == [True, False, False, False]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    command = ["run", str(source), "-o", str(tmp_path / "out"), "-m", "stub:8", "--devices", "cpu", "--dry-run"]
    assert run([*command, "--json"]) == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["dry_run"], told["rows"], told["precision"]) == (True, 4, "fp32")
    assert not (tmp_path / "out").exists()
