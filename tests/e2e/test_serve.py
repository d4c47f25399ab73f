"""`embq serve` as clients meet it: a process on loopback, over indices that were built from runs."""

from __future__ import annotations

import base64
import io
import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from embq.app.cli import entry_point
from embq.app.services.http_server import MOST_IN_FLIGHT
from embq.core.errors import Exit
from embq.core.rows.spec import RowSpec
from embq.worker.embedders.stub import stub_vector
from tests.e2e.served import Server, served
from tests.support.outputs.build import build, write_jsonl
from tests.support.outputs.index import build_index, pairs_indexed, texts
from tests.support.planning import call_at_once
from tests.support.waiting import wait_until

ROWS, DIM = 120, 16
UNIT = RowSpec(normalize=True)

CLIENT = {
    "deduplicate": True,
    "use_safety_model": True,
    "use_violence_detector": True,
    "use_mclip": False,
    "aesthetic_score": 9,
    "aesthetic_weight": 0.5,
    "modality": "image",
    "num_images": 40,
    "num_result_ids": 40,
}
"""Fields that clip-retrieval's client adds to a query by default."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of texts with its index."""
    folder = tmp_path_factory.mktemp("served")
    root = build(folder / "docs", [texts(folder, ROWS)], model=f"stub:{DIM}", unit_samples=40, rows=UNIT)
    build_index(root, output="text")
    return root


@pytest.fixture(scope="module")
def server(out: Path) -> Iterator[Server]:
    with served(out) as server:
        yield server


def vector_of(row: int) -> list[float]:
    return [float(x) for x in stub_vector(f"text {row}".encode(), DIM)]


# --- answers ---


def test_an_answer_has_the_shape_of_clip_retrievals(server: Server) -> None:
    found = server.knn(text="text 7", indice_name="docs", modality="text", num_images=3, num_result_ids=5)
    assert found[0]["id"] == 7
    assert set(found[0]) == {"id", "similarity", "key", "caption", "source", "url", "n", "metadata"}
    assert (found[0]["key"], found[0]["caption"], found[0]["url"], found[0]["n"]) == ("k7", "text 7", "http://x/7", 7)
    assert found[0]["similarity"] == pytest.approx(1, abs=2e-3)
    assert [set(row) == {"id", "similarity"} for row in found] == [False, False, False, True, True]
    similarities = [row["similarity"] for row in found]
    assert similarities == sorted(similarities, reverse=True)


def test_a_vector_finds_what_exact_search_finds_whatever_its_length(server: Server) -> None:
    rows = np.array([vector_of(i) for i in range(ROWS)])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    query = 50 * np.array(vector_of(3)) + 20 * np.array(vector_of(8))
    cosines = rows @ query / np.linalg.norm(query)
    best = np.argsort(-cosines)[:10]
    found = server.knn(embedding_input=query.tolist(), num_images=10)
    assert [row["id"] for row in found] == best.tolist()
    assert [row["similarity"] for row in found] == pytest.approx(cosines[best].tolist(), abs=2e-3)


def test_what_the_client_asks_for_and_is_not_there_is_reported_and_no_error(server: Server) -> None:
    answer = server.ask("/knn-service", {"text": "text 7", "indice_name": "docs", **CLIENT})
    assert answer.status == 200
    assert answer.json[0]["id"] == 7
    told = answer.headers["x-embq-not-applied"].split(", ")
    assert told[:4] == ["use_safety_model", "use_violence_detector", "aesthetic_score", "modality"]
    assert answer.headers["x-embq-index-version"] == "v0001"
    assert {"embed", "knn", "rows"} <= {
        part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")
    }


def test_more_results_than_rows_are_all_rows(server: Server) -> None:
    found = server.knn(text="text 7", num_images=0, num_result_ids=10_000)
    assert sorted(row["id"] for row in found) == list(range(ROWS))


def test_rows_are_given_by_their_ids_in_their_order(server: Server) -> None:
    found = server.ask("/metadata", {"ids": [9, 2, 9], "indice_name": "docs"}).json
    assert [row["id"] for row in found] == [9, 2, 9]
    assert [row["metadata"]["key"] for row in found] == ["k9", "k2", "k9"]
    assert [row["metadata"]["n"] for row in found] == [9, None, 9]
    assert server.ask("/metadata", {"ids": []}).json == []


def test_indices_are_listed(server: Server) -> None:
    assert server.ask("/indices-list").json == ["docs"]


def test_health_says_what_is_served(server: Server) -> None:
    wait_until(lambda: server.ask("/health").json["indices"][0]["model_state"] == "ready")
    wait_until(lambda: server.ask("/health").json["indices"][0]["coverage"] is not None)
    health = server.ask("/health").json
    assert health["status"] == "ok"
    (index,) = health["indices"]
    expected = {"name": "docs", "modality": "text", "version": "v0001", "rows": ROWS, "dim": DIM, "coverage": 1.0}
    assert {name: index[name] for name in expected} == expected
    assert index["similarity"] == "cosine"
    assert index["model"] == f"stub:{DIM}"


def test_requests_are_counted(server: Server) -> None:
    def value(name: str) -> float:
        lines = server.ask("/metrics").data.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    asked = 'embq_http_requests_total{route="/knn-service",status="200"}'
    searched = 'embq_search_seconds_count{step="knn"}'
    before = value(asked), value(searched)
    server.knn(text="text 1")
    assert (value(asked), value(searched)) == (before[0] + 1, before[1] + 1)
    assert value('embq_index_rows{index="docs",modality="text"}') == ROWS
    assert value('embq_index_info{index="docs",modality="text",version="v0001"}') == 1
    server.ask("/nothing/of/ours")
    assert value('embq_http_requests_total{route="other",status="404"}') >= 1
    summary = server.ask("/metrics-summary").data.decode()
    assert "requests to /knn-service" in summary
    assert "knn" in summary


def test_many_clients_are_answered_each_with_its_own(server: Server) -> None:
    wrong: list[object] = []

    def ask(row: int) -> None:
        for _ in range(5):
            found = server.knn(text=f"text {row}", num_images=2)
            if found[0]["key"] != f"k{row}":
                wrong.append((row, found))

    call_at_once(ask, 24)
    assert wrong == []


# --- refusals ---


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/knn-service", {"indice_name": "docs"}, 400, "no_query"),
        ("/knn-service", {"text": "x", "indice_name": "laion5B"}, 404, "no_such_index"),
        ("/knn-service", {"embedding_input": [1.0, 2.0]}, 400, "wrong_dimension"),
        ("/knn-service", {"text": "x", "num_result_ids": 1_000_000}, 413, "too_many"),
        ("/knn-service", {"image_url": "https://example.org/x.jpg"}, 403, "image_url_off"),
        ("/metadata", {"ids": [5, ROWS]}, 404, "no_such_id"),
        ("/metadata", {"ids": "5"}, 400, "bad_request"),
        ("/elsewhere", {}, 404, "no_such_route"),
        ("/health", {}, 405, "no_such_route"),
    ],
)
def test_a_mistake_is_answered_in_json(server: Server, path: str, body: object, status: int, code: str) -> None:
    answer = server.ask(path, body)
    assert (answer.status, answer.json["code"]) == (status, code)
    assert answer.json["message"]
    assert answer.json["next"]
    assert "Traceback" not in server.command.stderr


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "bad_json"),
        (b"text=a+cat", 400, "bad_json"),
        (b"\xff\xfe", 400, "bad_json"),
        (b'{"embedding_input": [NaN]}', 400, "bad_json"),
        (b"[" * 100_000, 400, "bad_json"),
        (b'{"text": "' + b"x" * (14 << 20) + b'"}', 413, "too_large"),
    ],
    ids=["empty", "a form", "no unicode", "nan", "deep", "large"],
)
def test_a_body_that_is_no_json_or_too_large_is_refused(server: Server, data: bytes, status: int, code: str) -> None:
    answer = server.ask("/knn-service", data=data)
    assert (answer.status, answer.json["code"]) == (status, code)


def test_more_requests_than_there_is_room_for_are_told_to_come_again(server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = b"POST /knn-service HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    share = MOST_IN_FLIGHT * 3 // 4

    def posts(count: int, client: str) -> None:
        for _ in range(count):
            address = (client, 0)
            connection = stack.enter_context(socket.create_connection((host, int(port)), 60, source_address=address))
            connection.sendall(head)

    def in_flight(count: int) -> None:
        wait_until(lambda: f"embq_http_in_flight {count + 1}.0" in server.ask("/metrics").data.decode())

    with ExitStack() as stack:
        posts(share + 30, "127.0.0.2")
        in_flight(share)
        assert server.knn(text="text 7")[0]["id"] == 7, "one client keeps out no other"
        posts(MOST_IN_FLIGHT - share, "127.0.0.3")
        in_flight(MOST_IN_FLIGHT)
        answer = server.ask("/knn-service", {"text": "text 7"})
        assert (answer.status, answer.json["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert server.ask("/health").status == 200
    in_flight(0)
    assert server.knn(text="text 7")[0]["id"] == 7


def test_other_names_and_pages_of_others_are_turned_away(server: Server) -> None:
    assert server.ask("/indices-list", Host="evil.example:1234").json["code"] == "wrong_host"
    assert server.ask("/indices-list", Host="localhost:8080").status == 200
    answer = server.ask("/knn-service", {"text": "x"}, Origin="https://evil.example")
    assert (answer.status, answer.json["code"]) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in answer.headers
    assert server.ask("/knn-service", {"text": "x"}, Origin=server.url).status == 200


# --- how it is started ---


def test_what_was_allowed_is_allowed_and_no_more(out: Path) -> None:
    page = "https://page.example"
    with served(
        out, "--no-model", "--fetch-image-urls", "--allow-origin", page, "--allow-host", "search.example"
    ) as server:
        answer = server.ask("/knn-service", {"embedding_input": vector_of(3)}, Origin=page)
        assert answer.json[0]["id"] == 3
        assert answer.headers["access-control-allow-origin"] == page
        assert "X-Embq-Not-Applied" in answer.headers["access-control-expose-headers"]
        assert server.ask("/indices-list", Origin="https://other.example").status == 403
        assert server.ask("/indices-list", Host="search.example").status == 200
        answer = server.ask("/knn-service", {"text": "text 3"})
        assert (answer.status, answer.json["code"]) == (501, "no_model")
        answer = server.ask("/knn-service", {"image_url": server.url.replace("http:", "https:")})
        assert (answer.status, answer.json["code"]) == (403, "image_url_refused")
        assert server.ask("/health").json["indices"][0]["model_state"] == "off"


def test_images_and_texts_of_a_run_are_two_modalities_of_one_name(tmp_path: Path) -> None:
    root = pairs_indexed(tmp_path, 40, dim=DIM)
    images = root / "index" / "image"
    other = shutil.copytree(images, tmp_path / "other")
    with served(root, "--name", f"other={other}", "--memory", "mmap") as server:
        assert server.ask("/indices-list").json == ["pairs", "other"]
        picture = base64.b64encode(b"image 21").decode()
        found = server.knn(image=picture, indice_name="pairs", modality="image", num_images=2)
        assert (found[0]["id"], found[0]["key"], found[0]["image_path"]) == (21, "s21", "s21")
        assert found[0]["similarity"] == pytest.approx(1, abs=2e-3)
        found = server.knn(text="caption 8", indice_name="pairs", modality="text", num_images=2)
        assert (found[0]["id"], found[0]["caption"]) == (8, "caption 8")
        assert found[0]["similarity"] == pytest.approx(1, abs=2e-3)
        assert server.knn(image=picture, indice_name="other")[0]["id"] == 21


def test_near_duplicates_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    lines: list[object] = [{"id": f"k{i}", "text": f"text {i % 20}"} for i in range(60)]
    root = build(tmp_path / "docs", [write_jsonl(tmp_path / "t.jsonl", lines)], model="stub:64", rows=UNIT)
    build_index(root, "--index-key", "IVF1,RaBitQ", "--refine", "fp16", "--recall", "0.5@10", output="text")
    with served(root, "--no-model") as server:
        query = [float(x) for x in stub_vector(b"text 7", 64)]
        every = server.knn(embedding_input=query, num_images=60)
        assert {row["id"] for row in every[:3]} == {7, 27, 47}
        answer = server.ask("/knn-service", {"embedding_input": query, "num_images": 60, "deduplicate": True})
        assert sorted(row["id"] % 20 for row in answer.json) == list(range(20))
        assert answer.json[0]["id"] == every[0]["id"]
        assert "x-embq-not-applied" not in answer.headers


def test_a_new_version_is_taken_up_and_one_that_is_damaged_is_not(tmp_path: Path) -> None:
    source = texts(tmp_path, rows=60)
    root = build(tmp_path / "docs", [source], model=f"stub:{DIM}", rows=UNIT)
    index = build_index(root, output="text")
    other = build(tmp_path / "more", [texts(tmp_path, rows=90)], model=f"stub:{DIM}", rows=UNIT)
    with served(index, "--no-model", "--memory", "mmap") as server:
        wrong, over = [], threading.Event()

        def ask() -> None:
            while not over.is_set():
                found = server.knn(embedding_input=vector_of(30), num_images=3)
                if found[0]["id"] != 30 or found[0]["caption"] != "text 30":
                    wrong.append(found)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            build_index(other, output="text", to=index)
            wait_until(lambda: server.ask("/health").json["indices"][0]["version"] == "v0002")
            assert server.knn(embedding_input=vector_of(75))[0]["caption"] == "text 75"
            (index / "CURRENT").write_text("v0009\n")
            wait_until(lambda: server.ask("/health").json["indices"][0]["reload_failed"])
            assert server.knn(embedding_input=vector_of(75))[0]["caption"] == "text 75"
        finally:
            over.set()
            thread.join()
        assert wrong == []
        assert "index_reloaded" in server.command.stderr
        assert "index_not_reloaded" in server.command.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_it_with_0_after_what_has_begun(out: Path, number: int) -> None:
    with served(out, "--no-model") as server:
        body = json.dumps({"embedding_input": vector_of(3), "num_images": 1}).encode()
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = f"POST /knn-service HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body[:10])
            wait_until(lambda: b"embq_http_in_flight 2.0" in server.ask("/metrics").data)
            server.command.signal(number)
            wait_until(lambda: not reachable(host, int(port)))
            connection.sendall(body[10:])
            answer = connection.makefile("rb").read()
        assert b" 200 OK\r\n" in answer
        assert answer.endswith(b"]")
        assert server.command.process.wait(60) == Exit.DONE, server.command.said
        assert "Traceback" not in server.command.stderr


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError:
        return False
    return True


def test_what_cannot_be_served_is_said_before_anything_listens(out: Path, tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> tuple[int, str]:
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(said):
            status = entry_point.run(["serve", *map(str, arguments)])
        assert "listening" not in said.getvalue()
        return status, said.getvalue()

    status, said = refused("--port", "0")
    assert (status, "there is no index to serve" in said) == (Exit.USAGE, True)
    status, said = refused(tmp_path, "--port", "0")
    assert (status, "error[no_index]" in said) == (Exit.BAD_INPUT, True)
    status, said = refused(out, "--name", f"docs={shutil.copytree(out, tmp_path / 'x')}", "--port", "0")
    assert (status, "would both be 'docs'" in said) == (Exit.USAGE, True)
    status, said = refused("--name", "docs", "--port", "0")
    assert (status, "is not NAME=INDEX" in said) == (Exit.USAGE, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = refused(out, "--port", str(taken.getsockname()[1]))
    assert (status, "error[port_in_use]" in said) == (Exit.TRY_LATER, True)
    status, said = refused(out, "--host", "192.0.2.1", "--port", "0")
    assert (status, "error[not_bindable]" in said) == (Exit.CONFIG, True)
