"""The two forms of the log: a line of text, and a JSON object."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from embq.core.errors import ConfigError, Exit
from embq.core.service.log import Events, configure
from embq.core.settings import child_environment

LOG = Events("writer")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    logging.captureWarnings(False)
    root.setLevel(level)


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_is_an_object_of_five_keys_and_keeps_its_types(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBQ_LOG", "json")
    configure()
    LOG.info(
        "committed", run="965d", n=7, rate=1.5, done=True, gap=None, units=[1, 2], lost=float("nan"), at=Path("/x")
    )
    (line,) = said(capsys)
    assert list(line) == ["time", "level", "service", "event", "fields"]
    assert (line["level"], line["service"], line["event"]) == ("info", "writer", "committed")
    assert str(line["time"]).endswith("Z")
    assert len(str(line["time"])) == len("2026-11-22T08:15:30.123Z")
    expected = {"run": "965d", "n": 7, "rate": 1.5, "done": True, "gap": None, "units": [1, 2]}
    assert line["fields"] == {**expected, "lost": "nan", "at": "/x"}


def test_secrets_are_masked_in_every_value_and_the_line_stays_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBQ_LOG", "json")
    configure()
    url = "redis://writer:se,cr@et@box:6379"
    LOG.warning("storage_away", url=url, password="hunter2", urls=[url, {"password": "hunter2"}], why="a b\n\x1b[2J")
    (line,) = said(capsys)
    text = json.dumps(line)
    assert "****" in text
    assert "hunter2" not in text
    assert "et@box" not in text
    assert line["fields"]["why"] == "a b\n\x1b[2J"  # type: ignore[index]
    assert line["level"] == "warning"


def test_a_traceback_and_the_words_of_other_libraries_are_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBQ_LOG", "json")
    configure()
    try:
        raise ValueError("broken")
    except ValueError:
        LOG.bug("bug", unit="u1")
    logging.getLogger("uvicorn").error("cannot %s", "listen")
    bug, foreign = said(capsys)
    assert (bug["event"], bug["level"]) == ("bug", "error")
    assert "ValueError: broken" in str(bug["fields"]["traceback"])  # type: ignore[index]
    assert (foreign["service"], foreign["event"], foreign["fields"]) == (
        "uvicorn",
        "message",
        {"text": "cannot listen"},
    )


def test_a_server_says_in_json_where_it_listens_and_that_anybody_may_ask(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embq", "serve", "--follow", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]
    environment = child_environment(EMBQ_LOG="json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as serve:
        assert serve.stderr is not None
        assert serve.stdout is not None
        said = [json.loads(serve.stderr.readline()) for _ in range(2)]
        serve.terminate()  # before uvicorn has handlers of its own: it ends all the same
        assert serve.stdout.read() == ""
        assert serve.wait(60) == Exit.DONE
    assert [line["event"] for line in said] == ["no_password", "listening"]
    assert said[1]["fields"]["url"].startswith("http://0.0.0.0:")


def test_warnings_of_python_are_objects_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBQ_LOG", "json")
    configure()
    try:
        with warnings.catch_warnings():
            logging.captureWarnings(False)
            logging.captureWarnings(True)
            warnings.simplefilter("always")
            warnings.warn("this is slow", stacklevel=1)
    finally:
        logging.captureWarnings(False)
    (line,) = said(capsys)
    assert (line["service"], line["event"]) == ("py.warnings", "message")
    assert "this is slow" in line["fields"]["text"]  # type: ignore[index]


def test_text_is_the_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("", "text"):
        monkeypatch.setenv("EMBQ_LOG", value)
        configure()
        LOG.info("committed", run="965d", why="two words")
        assert capsys.readouterr().err.split(" ", 1)[1] == "info writer committed run=965d why='two words'\n"


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_LOG", "xml")
    with pytest.raises(ConfigError, match="neither text nor json"):
        configure()


@pytest.mark.parametrize("verb", ["producer", "writer", "worker"])
def test_a_service_that_cannot_start_says_so_in_json(verb: str) -> None:
    environment = child_environment(EMBQ_LOG="json", EMBQ_BROKER_URL="redis://ann:secret@127.0.0.1:1")
    devices = ["--devices", "cpu"] if verb == "worker" else []
    command = [sys.executable, "-m", "embq", verb, *devices]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == Exit.UNAVAILABLE, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["event"] == "stopped"
    assert lines[-1]["fields"]["code"] == "broker"
    assert lines[-1]["fields"]["next"]
    assert "secret" not in done.stderr
