"""Services of `embq run`: the error of one that gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.app.local.service_process import ServiceProcess, _event_fields
from embq.core.errors import EmbqError, Exit

EARLIER = (
    "2026-01-01T00:00:00Z error worker stopped code=earlier why='of an earlier run' next='nothing'\n"
    "error[earlier]: of an earlier run\n  next:  nothing\n"
)


def ended(log: Path, *arguments: str, broker_url: str) -> EmbqError:
    """The error of a writer that ends by itself."""
    child = ServiceProcess("writer", arguments, log=log, broker_url=broker_url)
    child.start()
    assert child.process is not None
    child.process.wait(60)
    with pytest.raises(EmbqError) as caught:
        child.supervise()
    return caught.value


def test_the_error_of_a_service_is_that_of_its_last_start(tmp_path: Path) -> None:
    log = tmp_path / "_logs" / "writer.log"
    log.parent.mkdir()
    log.write_text(EARLIER)
    refused = ended(log, broker_url="http://127.0.0.1:1")
    assert (refused.code, refused.exit_code) == ("config", Exit.CONFIG)
    assert refused.message
    assert refused.next_step
    unknown = ended(log, "--no-such-option", broker_url="redis://127.0.0.1:1")
    assert (unknown.code, unknown.exit_code) == ("service", Exit.USAGE)
    assert unknown.message == f"the writer ended with status {Exit.USAGE:d}"
    assert unknown.next_step == f"its log is {log}"


def test_loading_is_that_of_this_session(tmp_path: Path) -> None:
    log = tmp_path / "_logs" / "worker.log"
    log.parent.mkdir()
    child = ServiceProcess("worker", [], log=log, broker_url="")
    assert child.loaded_s() == 0
    before = "2026-03-14T09:26:53Z info worker model_loaded model=minilm device=cpu seconds=77.0\n"
    log.write_text(before)
    child._first_start = len(before)
    assert child.loaded_s() == 0
    for device, seconds in (("cpu", 11.93), ("cuda:0", 3.5), ("cuda:1", "x")):
        with log.open("a") as file:
            file.write(
                f"2026-03-14T09:27:53Z info worker model_loaded model=minilm device={device} seconds={seconds}\n"
            )
    assert child.loaded_s() == 11.93


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ("why=gone next=x", ("service", "gone", "x")),
        (
            """code=model why="it has no weights 'a'" next='near: b, c'""",
            ("model", "it has no weights 'a'", "near: b, c"),
        ),
        ("""code=x why='\\'a\\' and "b"\\n' next=''""", ("x", "'a' and \"b\"\n", "")),
        ("""code=x why='cut""", ("x", "'cut", "")),
    ],
)
def test_the_words_of_an_event_are_those_that_were_logged(logged: str, said: tuple[str, str, str]) -> None:
    assert _event_fields(f"2026-01-01 error worker stopped {logged}") == said
