"""Description of a host before a training is started on it."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from threading import Thread

from embq.training.launch.ssh_host import HostReport, Question, free_port, from_json, report_of
from tests.support.servers.storage import http_server


def answer(**question: object) -> HostReport:
    with ExitStack() as stack:
        return report_of(Question(**question), stack)  # type: ignore[arg-type]


def test_shards_are_looked_for_as_they_were_named(tmp_path: Path) -> None:
    for name in ("a-0.tar", "a-1.tar"):
        (tmp_path / name).touch()
    there = [
        f"{tmp_path}/a-{{0..1}}.tar",
        f"{tmp_path}/a-*.tar",
        str(tmp_path),
        f"{tmp_path}/a-0.tar::{tmp_path}/a-1.tar",
    ]
    assert answer(inputs=there).missing == []
    found = answer(inputs=[f"{tmp_path}/a-{{0..2}}.tar", f"{tmp_path}/b-*.tar", "pipe:cat x"]).missing
    assert [place for place, _ in found] == [f"{tmp_path}/a-{{0..2}}.tar", f"{tmp_path}/b-*.tar", "pipe:cat x"]
    assert "a-2.tar: does not exist" in found[0][1]


def test_of_shards_behind_http_the_first_and_the_last_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a-0.tar").write_bytes(b"x")
    with http_server(tmp_path) as server:
        url = server.url
        assert answer(inputs=[f"{url}/a-{{0..0}}.tar"]).missing == []
        assert answer(inputs=[f"{url}/a-{{0..9}}.tar"]).missing == [[f"{url}/a-9.tar", "the server answers 404"]]
    gone = f"http://127.0.0.1:{free_port()}/a.tar"
    ((place, why),) = answer(inputs=[gone]).missing
    assert (place, "refused" in why) == (gone, True)


def test_a_port_is_held_for_as_long_as_the_question_stays_open() -> None:
    with ExitStack() as stack:
        found = report_of(Question(listen=0), stack)
        assert answer(reach=f"127.0.0.1:{found.port}").unreached == ""
        again = answer(listen=found.port)
        assert again.port == 0
        with socket.create_server(("127.0.0.1", again.free)):
            pass
    assert "refused" in answer(reach=f"127.0.0.1:{found.port}").unreached


def test_another_program_where_the_hosts_are_to_meet_is_not_the_first_host() -> None:
    elsewhere = "another machine or program answers there"
    with ExitStack() as stack:
        first = report_of(Question(listen=0, greeting="abc"), stack)
        assert answer(reach=f"127.0.0.1:{first.port}", greeting="abc").unreached == ""
        assert answer(reach=f"127.0.0.1:{first.port}", greeting="abd").unreached == elsewhere
        assert answer(reach=f"127.0.0.1:{first.port}", greeting="abc").unreached == ""
    with socket.create_server(("127.0.0.1", 0)) as other:
        Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        assert answer(reach=f"127.0.0.1:{other.getsockname()[1]}", greeting="abc").unreached == elsewhere


def test_the_answer_of_another_version_is_understood_as_far_as_its_version() -> None:
    there = asdict(answer())
    assert from_json(HostReport, {**there, "embq": "9.9", "new": True}) == HostReport(**{**there, "embq": "9.9"})
    assert from_json(Question, {"new": 1, "listen": 5}) == Question(listen=5)
