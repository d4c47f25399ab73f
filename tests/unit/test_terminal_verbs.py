"""`embq logs`, `config` and `completion`, --no-color, and the dry run of `embq run`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import BashComplete

from embq.app.cli.entry_point import cli, run
from embq.core.errors import Exit
from embq.core.settings import Settings
from tests.support.outputs.build import build, write_jsonl, write_log

EMBQ = str(Path(sys.executable).with_name("embq"))
TEXTS = [{"text": f"text {number}"} for number in range(4)]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
COLOR = re.compile(r"\x1b\[[0-9;]*3[0-7]")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    return build(tmp_path / "out", [source])


def model_folders(folder: Path) -> None:
    """Folders of models: mine of the family st, and models/deep of hf."""
    (folder / "mine").mkdir()
    (folder / "mine" / "modules.json").write_text("[]")
    (folder / "models" / "deep").mkdir(parents=True)
    (folder / "models" / "deep" / "config.json").write_text("{}")


def read_until(terminal: int, wanted: str) -> None:
    """Read from a terminal until it has shown a text."""
    shown, deadline = "", time.monotonic() + 30
    while wanted not in shown:
        left_s = deadline - time.monotonic()
        assert select.select([terminal], [], [], max(0.0, left_s))[0], shown
        shown += os.read(terminal, 65_536).decode(errors="replace").replace("\x07", "")


# --- logs ---


def test_logs_of_all_services_are_in_the_order_of_time(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(out, "writer", "2026-01-01T00:00:02Z info writer b", "Traceback:", "2026-01-01T00:00:04Z info writer d")
    write_log(out, "worker", "2026-01-01T00:00:01Z info worker a", "2026-01-01T00:00:03Z info worker c")
    assert run(["logs", str(out)]) == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["a", "b", "Traceback:", "c", "d"]
    assert run(["logs", str(out), "--service", "writer", "-n", "1"]) == Exit.DONE
    assert capsys.readouterr().out == "2026-01-01T00:00:04Z info writer d\n"


def test_control_characters_and_secrets_of_a_log_do_not_reach_the_terminal(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(out, "worker", "\x1b[2J redis://user:secret@box")
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


def test_only_the_end_of_a_large_log_is_read(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "_logs").mkdir()
    with open(out / "_logs" / "worker.log", "wb") as file:
        file.truncate(8 << 30)  # a hole: read as a whole it would be a line of 8 GiB
    write_log(out, "worker", "", *(f"2026-01-01T00:00:0{n}Z info worker line {n}" for n in range(3)))
    began = time.monotonic()
    assert run(["logs", str(out), "-n", "2"]) == Exit.DONE
    assert [line[-6:] for line in capsys.readouterr().out.splitlines()] == ["line 1", "line 2"]
    assert time.monotonic() - began < 10


def test_logs_are_followed(out: Path) -> None:
    write_log(out, "writer", "first")
    with subprocess.Popen([EMBQ, "logs", str(out), "-f"], stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        write_log(out, "worker", "of a service that starts later")
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
    model_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    for typed, offered in (
        ("", ["minilm", "st:", "hf:", "open_clip:", "stub:", "st:./mine"]),
        ("m", ["minilm"]),
        ("st:", ["st:./mine", "st:./models/"]),
        ("hf:models/", ["hf:models/deep"]),
        (f"hf:{tmp_path}/models/", [f"hf:{tmp_path}/models/deep"]),
        ("name=st:./mi", ["name=st:./mine"]),
        ("hf:nowhere/", []),
        ("st:~nobody/", []),
    ):
        completion = BashComplete(cli, {}, "embq", "_EMBQ_COMPLETE")
        for verb in (["run", "texts"], ["bench", "workers"], ["doctor"]):
            found = completion.get_completions([*verb, "-m"], typed)
            assert [one.value for one in found] == offered, (verb, typed)


@needs_bash
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("stat", {"status"}),
        ("bench uni", {"unit-size"}),
        ("export --output-f", {"--output-format"}),
        ("zzz", set()),
        ("index del", {"delete"}),
        ("index --metr", {"--metric-type"}),
    ],
)
def test_bash_completes_verbs_and_options(words: str, wanted: set[str]) -> None:
    script = (
        f'eval "$({EMBQ} completion bash)"; COMP_WORDS=({EMBQ} {words}); COMP_CWORD={len(words.split())}; '
        f'_embq_completion {EMBQ}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted


@needs_bash
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("-m open_c", "-m open_clip:"),
        ("-m st:./mi", "-m st:./mine "),
        ("-m hf:./mod", "-m hf:./models/deep "),
        ("--model=hf:models/d", "--model=hf:models/deep "),
        ("-m name=st:./mi", "-m name=st:./mine "),
        ("tex", "texts.jsonl "),
    ],
)
def test_bash_at_a_terminal_completes_words_with_colons_and_files(tmp_path: Path, typed: str, completed: str) -> None:
    """bash splits words at ":" and "=", and replaces only what follows."""
    model_folders(tmp_path)
    (tmp_path / "texts.jsonl").touch()
    (tmp_path / "rc").write_text(f'PS1="READY "; PATH={Path(EMBQ).parent}:$PATH; eval "$(embq completion bash)"\n')
    ours, theirs = pty.openpty()
    shell = ["bash", "--noprofile", "--rcfile", "rc", "-i"]
    with subprocess.Popen(
        shell, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as bash:
        os.close(theirs)
        try:
            read_until(ours, "READY ")
            os.write(ours, f"embq run {typed}\t\t".encode())  # the second for a folder below
            read_until(ours, f"embq run {completed}")
        finally:
            bash.kill()
            os.close(ours)


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


def test_a_dry_run_takes_the_speed_of_an_earlier_run_and_else_names_the_trial_that_measures_it(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(short_tmp / "state"))
    source = write_jsonl(short_tmp / "texts.jsonl", [{"text": f"text {number}"} for number in range(3_000)])
    command = ["run", str(source), "-m", "stub:8?ms_per_sample=2", "--devices", "cpu", "--quiet"]
    dry = [*command, "-o", str(short_tmp / "out"), "--dry-run"]

    def told(*options: str) -> dict[str, Any]:
        assert run([*dry, *options, "--json"]) == Exit.DONE
        return dict(json.loads(capsys.readouterr().out))

    assert (told()["devices"], told()["total_hours"]) == ([], None)
    assert run(dry) == Exit.DONE
    assert "`--limit 2000 -o TRIAL` in place of --dry-run" in capsys.readouterr().out
    # Given that trial, then its speed answers, for that model and precision alone.
    assert run([*command, "--limit", "2000", "-o", str(short_tmp / "trial")]) == Exit.DONE
    capsys.readouterr()
    found = told()
    [device] = found["devices"]
    assert device["measured_by"].startswith(f"{short_tmp / 'trial'} on 20")
    assert 0 < device["rows_per_s"] <= 500
    assert found["total_hours"] == pytest.approx(3_000 / device["rows_per_s"] / 3_600, abs=1e-4)
    assert run(dry) == Exit.DONE
    shown = capsys.readouterr().out
    assert f"rows/s measured by the run in {device['measured_by']}; 1 here" in shown
    assert "on this machine" in shown
    assert told("--precision", "int8")["devices"] == []
    for file in (short_tmp / "state" / "embq" / "speeds").iterdir():
        file.write_text("{")
    assert told()["devices"] == []
