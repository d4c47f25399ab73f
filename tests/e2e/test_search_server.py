"""`embq search http://…`: an index behind a server, asked from a machine that has nothing but embq itself."""

from __future__ import annotations

import http.server
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import EmbqError, Exit
from embq.core.rows.spec import RowSpec
from embq.retrieval.serving.indices import Indices
from embq.retrieval.serving.metrics import Metrics
from embq.retrieval.serving.query_images import QueryImages
from embq.retrieval.serving.query_models import QueryModels
from embq.retrieval.serving.search import Search
from embq.retrieval.serving.served_index import ServedIndex, open_version
from embq.worker.embedders.stub import stub_vector
from tests.e2e.served import Server, served
from tests.support.outputs.build import build
from tests.support.outputs.index import build_index, pairs_indexed, search_refusal, texts
from tests.support.servers.storage import serving

ROWS, DIM = 60, 16
UNIT = RowSpec(normalize=True)

LAPTOP = """
import sys
for name in ("numpy", "torch", "faiss", "transformers", "starlette", "PIL"):
    sys.modules[name] = None
from embq.app.cli.entry_point import run
status = run(sys.argv[1:])
sys.exit(status)
"""
"""embq as it is where the packages of the other roles are not installed: to import one is an error."""


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of texts with an index."""
    folder = tmp_path_factory.mktemp("docs")
    root = build(folder / "docs", [texts(folder, ROWS)], model=f"stub:{DIM}", rows=UNIT)
    build_index(root, output="text")
    return root


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of images with captions, with an index of each."""
    return pairs_indexed(tmp_path_factory.mktemp("pairs"), 30, dim=DIM)


@pytest.fixture(scope="module")
def server(docs: Path) -> Iterator[Server]:
    with served(docs) as one:
        yield one


@pytest.fixture(scope="module")
def two(docs: Path, pairs: Path) -> Iterator[Server]:
    with served(docs, pairs) as both:
        yield both


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(["search", *arguments, "--json"]) == Exit.DONE
    said: dict[str, object] = json.loads(capsys.readouterr().out)
    return said


# --- the same answers as on the machine of the index ---


@pytest.mark.parametrize(
    "question",
    [
        ["text 7", "-k", "5"],
        ["--id", "3", "-k", "4"],
        ["text 9", "--nprobe", "1", "--no-refine"],
        ["text 1", "-k", "500"],
        ["text 1", "--where", "n >= 11", "--where", "url contains /3", "-k", "50"],
        ["text 1", "--where", "key in k3, k4, k60"],
        ["text 1", "--like", "3", "--like", "5", "--unlike", "8", "-k", "4"],
        ["--like", "3", "--where", "n != 5"],
        ["text 1", "-k", "7", "--offset", "14"],
    ],
    ids=["text", "id", "options", "all rows", "where", "in", "examples", "no query", "offset"],
)
def test_a_server_gives_what_the_folder_gives(
    question: list[str], docs: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = (answer(capsys, index, *question) for index in (str(docs), server.url))
    assert there["results"] == here["results"]
    assert here["results"]
    assert list(there) == list(here) == ["schema", "results", "timing"]
    assert list(there["timing"]) == list(here["timing"])  # type: ignore[call-overload]


def test_the_table_is_the_same(docs: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for index in (str(docs), server.url + "/"):
        assert run(["search", index, "text 7", "-k", "3"]) == Exit.DONE
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert tables[0].split()[2] == "k7"


def test_a_vector_and_an_image_are_asked_by(
    two: Server, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = stub_vector(b"text 8", DIM)
    np.save(tmp_path / "v.npy", np.stack([vector, -vector]))
    (tmp_path / "v.json").write_text(json.dumps([float(x) for x in vector]))
    for name in ("v.npy", "v.json"):
        found = answer(capsys, two.url, "--index", "docs", "--vector", str(tmp_path / name), "-k", "1")
        assert found["results"] == embq_results(docs, vector)
    (tmp_path / "asked.jpg").write_bytes(b"image 21")
    image = ["--image", str(tmp_path / "asked.jpg"), "-k", "1"]
    found = answer(capsys, two.url, "--index", "pairs", "--vector-name", "image", *image)
    assert found["results"][0]["key"] == "s21"  # type: ignore[index]
    found = answer(capsys, two.url, "--index", "pairs", "--vector-name", "text", "caption 4", "-k", "1")
    assert found["results"][0]["key"] == "s04"  # type: ignore[index]


def embq_results(docs: Path, vector: np.ndarray) -> list[dict[str, object]]:
    return [one.describe() for one in embq.search(docs, vector=vector, k=1)]


def test_python_gets_the_same_objects(two: Server, docs: Path, pairs: Path) -> None:
    assert embq.search(two.url, "text 3", name="docs", k=4) == embq.search(docs, "text 3", k=4)
    options = {"where": ["n > 9", ("url", "!=", "http://x/13")], "like": [3], "unlike": (4, 6), "offset": 2, "k": 5}
    found = embq.search(two.url, "text 3", name="docs", **options)  # type: ignore[arg-type]
    assert found == embq.search(docs, "text 3", **options)  # type: ignore[arg-type]
    assert [one.rank for one in found] == [3, 4, 5, 6, 7]
    assert all(one.metadata["n"] > 9 and one.id != 13 for one in found)
    assert embq.search(docs, "text 3", where="n = 9")[0].id == 9
    vector = stub_vector(b"text 5", DIM)
    for given in (vector, vector.tolist(), vector[None]):
        assert [one.key for one in embq.search(two.url, vector=given, name="docs", k=1)] == ["k5"]
    found = embq.search(two.url, image=b"image 2", name="pairs", vector_name="image", k=1)
    assert found == embq.search(pairs, image=b"image 2", vector_name="image", k=1)


@pytest.mark.parametrize("way", ["--json", "--vector"])
def test_a_laptop_without_numpy_torch_and_faiss_is_answered(way: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(json.dumps([float(x) for x in stub_vector(b"text 11", DIM)]))
    asked = ["text 11"] if way == "--json" else ["--vector", str(tmp_path / "v.json")]
    arguments = [sys.executable, "-c", LAPTOP, "search", server.url, *asked, "-k", "1", "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    assert json.loads(done.stdout)["results"][0]["key"] == "k11"


def test_a_npy_file_where_numpy_is_not_installed_says_what_to_do(server: Server, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones(DIM))
    arguments = [sys.executable, "-c", LAPTOP, "search", server.url, "--vector", str(tmp_path / "v.npy")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.CONFIG
    assert "error[no_numpy]" in done.stderr
    assert "pip install numpy" in done.stderr


def test_pages_follow_each_other_and_the_time_of_a_filter_is_its_own(server: Server) -> None:
    body = {"text": "text 5", "where": [["n", ">=", 0]], "nprobe": 1_000}
    whole = server.ask("/search", {**body, "k": 30}).json["results"]
    pages = [server.ask("/search", {**body, "k": 8, "offset": at}).json for at in range(0, 40, 8)]
    assert [one for page in pages for one in page["results"]] == whole
    assert len(whole) == 30
    timing = server.ask("/search", {**body, "where": [["n", ">", 7]]}).json["timing"]
    assert list(timing) == ["load_s", "filter_ms", "embed_ms", "search_ms", "rows_ms"]
    assert timing["filter_ms"] > 0
    assert server.ask("/search", {"text": "text 5"}).json["timing"]["filter_ms"] == 0
    assert b'embq_search_seconds_count{step="filter"}' in server.ask("/metrics").data


def test_the_columns_of_an_index_are_listed_for_a_page(docs: Path) -> None:
    index = ServedIndex(
        name="docs",
        modality="text",
        path=docs / "index" / "text",
        opener=partial(open_version, memory="mmap", threads=1),
        count_rows=lambda _: None,
    )
    models = QueryModels(None, on_ready=lambda _: None)
    search = Search(Indices([index]), models, QueryImages(models, len), Metrics(), image_urls=False)
    found = {one.name: one for one in anyio.run(search.columns, "docs", "")}
    index.close()
    assert list(found) == ["key", "caption", "source", "url", "n", "metadata"]
    assert found["source"].values == ((str(docs.parent / "texts.jsonl"), ROWS),)
    assert found["n"].values == tuple((n, 1) for n in range(1, ROWS, 2))
    assert (found["url"].type, found["url"].values, found["url"].rows) == ("string", None, ROWS)


# --- which index ---


def test_of_several_indices_one_has_to_be_named(two: Server, capsys: pytest.CaptureFixture[str]) -> None:
    status, code, said = search_refusal(capsys, two.url, "text 3")
    assert (status, code) == (Exit.BAD_INPUT, "which_index")
    assert "--name docs | pairs" in said
    status, code, said = search_refusal(capsys, two.url, "text 3", "--index", "laion")
    assert (status, code) == (Exit.BAD_INPUT, "no_such_index")
    assert "--name docs | pairs" in said
    status, code, said = search_refusal(capsys, two.url, "text 3", "--index", "pairs")
    assert (status, code) == (Exit.BAD_INPUT, "which_index")
    assert "--vector-name image | text" in said
    status, code, said = search_refusal(capsys, two.url, "text 3", "--index", "docs", "--vector-name", "image")
    assert (status, code) == (Exit.BAD_INPUT, "no_such_index")
    assert "--vector-name text" in said


def test_a_server_refuses_by_itself_what_does_not_say_which(two: Server) -> None:
    for body, code in (
        ({"text": "x"}, "which_index"),
        ({"text": "x", "index": "pairs"}, "which_index"),
        ({"text": "x", "index": "laion"}, "no_such_index"),
        ({"text": "x", "index": "docs", "modality": "image"}, "no_such_index"),
        ({"text": "x", "id": 3, "index": "docs"}, "no_query"),
        ({"index": "docs"}, "no_query"),
        ({"text": "x", "index": "docs", "kk": 3}, "bad_request"),
        ({"text": "x", "index": "docs", "refine": 1}, "bad_request"),
        ({"text": "x", "index": "docs", "nprobe": 0}, "bad_request"),
        ({"id": "3", "index": "docs"}, "bad_request"),
        ({"id": -1, "index": "docs"}, "no_such_id"),
        ({"id": ROWS, "index": "docs"}, "no_such_id"),
        ({"vector": [1.0], "index": "docs"}, "wrong_dimension"),
        ({"vector": ["a"], "index": "docs"}, "bad_query"),
        ({"image": "?", "index": "docs"}, "bad_query"),
        ({"text": "x", "k": 10_001, "index": "docs"}, "too_many"),
        ({"text": "x", "k": 1, "offset": 10_000, "index": "docs"}, "too_many"),
        ({"text": "x", "offset": -1, "index": "docs"}, "bad_request"),
        ({"unlike": [3], "index": "docs"}, "no_query"),
        ({"like": [], "index": "docs"}, "no_query"),
        ({"like": [ROWS], "index": "docs"}, "no_such_id"),
        ({"text": "x", "unlike": [-1], "index": "docs"}, "no_such_id"),
        ({"text": "x", "like": 3, "index": "docs"}, "bad_request"),
        ({"text": "x", "like": ["3"], "index": "docs"}, "bad_request"),
        ({"text": "x", "like": list(range(33)), "index": "docs"}, "bad_request"),
        ({"text": "x", "where": [["rank", "=", 3]], "index": "docs"}, "no_column"),
        ({"text": "x", "where": [["n", "=", "many"]], "index": "docs"}, "bad_filter"),
        ({"text": "x", "where": [["n", "in", 3]], "index": "docs"}, "bad_filter"),
        *(
            ({"text": "x", "where": where, "index": "docs"}, "bad_request")
            for where in (
                "n = 3",
                {"n": 3},
                ["n", "=", 3],
                ["n = 3"],
                [["n", "="]],
                [["n", "=", 3, 4]],
                [["n", "~", 3]],
                [["n", "=", None]],
                [["n", "=", {}]],
                [["n", "=", 2**63]],
                [["n", "in", []]],
                [["n", "in", [[3]]]],
                [["n", "in", [3] * 257]],
                [["n", "=", 3]] * 17,
                [["n" * 1_001, "=", 3]],
                [["url", "=", "x" * 1_001]],
                [["url", "=", "\ud800"]],
            )
        ),
        ({"text": "x" * 10_001, "index": "docs"}, "too_long"),
    ):
        refused = two.ask("/search", body)
        assert (400 <= refused.status < 500, refused.json["code"]) == (True, code), body
        assert refused.json["next"]


# --- what is refused ---


def test_where_nothing_listens_the_tunnel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    status, code, said = search_refusal(capsys, f"http://localhost:{port}", "words")
    assert (status, code) == (Exit.UNAVAILABLE, "server_away")
    assert "Connection refused" in said
    assert f"ssh -N -L {port}:127.0.0.1:1234 BOX" in said
    status, code, said = search_refusal(capsys, "http://nowhere.invalid:1234", "words")
    assert (status, code) == (Exit.UNAVAILABLE, "server_away")
    assert "ssh -N -L 1234:127.0.0.1:1234 nowhere.invalid, then ask http://localhost:1234" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://", "words"], "is not the address of a server"),
        (["http://localhost:port", "words"], "is not the address of a server"),
        (["http://localhost:1234/?a=b", "words"], "is not the address of a server"),
        (["http://ann:secret@localhost:1234", "words"], "list of processes"),
        (["http://localhost:1234", "words", "--model", "minilm"], "--model is for an index on this machine"),
        (["http://localhost:1234", "words", "--prompt", "query: "], "--prompt is for an index"),
        (["http://localhost:1234"], "no query is given"),
        (["out", "words", "--index", "docs"], "selects an index of a server"),
        (["localhost:1234", "words"], "embq search http://localhost:1234"),
        (["box:1234", "words"], "embq search http://box:1234"),
        (["10.0.0.5:1234/", "words"], "embq search http://10.0.0.5:1234/"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_before_anybody_is_asked(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, code, message = search_refusal(capsys, *arguments)
    assert (status, code) == (Exit.USAGE, "usage")
    assert said in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--id", "60"], "no_such_id", "0 to 59"),
        (["--vector", "short.json"], "wrong_dimension", "16 numbers, the query has 2"),
        (["--vector", "words.json"], "bad_query", "something else than numbers"),
        (["--vector", "missing.json"], "bad_query", "No such file"),
        (["--image", "missing.png"], "bad_query", "cannot be read"),
        (["--image", "large.png"], "too_large", "10,485,760"),
        (["text 1", "-k", "10001"], "too_many", "10,000"),
        (["x" * 10_001], "too_long", "10,000"),
        (["   "], "bad_query", "cannot be embedded"),
    ],
    ids=["id", "length", "words", "no file", "no image", "large image", "results", "text", "blank"],
)
def test_a_question_that_cannot_be_answered_says_why(
    arguments: list[str],
    code: str,
    said: str,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.json").write_text("[1, 2]")
    (tmp_path / "words.json").write_text('["a"]')
    (tmp_path / "large.png").write_bytes(bytes(10 * 2**20 + 1))
    status, told, message = search_refusal(capsys, server.url, *arguments)
    assert (status, told) == (Exit.BAD_INPUT, code)
    assert said in message


def test_a_server_without_a_model_is_asked_by_vectors(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(docs, "--no-model") as server:
        status, code, said = search_refusal(capsys, server.url, "words")
        assert (status, code) == (Exit.BAD_INPUT, "no_model")
        assert "--no-model" in said
        assert len(answer(capsys, server.url, "--id", "3")["results"]) == 10  # type: ignore[arg-type]


# --- what answers, and is no embq serve of this version ---


@contextmanager
def answering(status: int, body: bytes, search_status: int = 200, search: object = None) -> Iterator[str]:
    """A server that gives each request the same answer; `search` is the answer to a POST."""

    class Same(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(search_status)
            self.end_headers()
            self.wfile.write(json.dumps(search).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with serving(Same) as port:
        yield f"http://127.0.0.1:{port}"


HEALTH = {"status": "ok", "embq": "9.9", "search": 1}
INDEX = {"name": "docs", "modality": "text", "model_state": "loading", "model": "minilm"}


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (200, b"<html>nginx</html>", "other_server", "JSON"),
        (404, b"not found", "other_server", "HTTP 404"),
        (302, b"", "other_server", "HTTP 302"),
        (200, b'["out"]', "other_server", "not a JSON object"),
        (200, b'{"status": "ok"}', "other_server", "does not list indexes"),
        (200, json.dumps({**HEALTH, "indices": [], "search": 2}).encode(), "other_version", "embq 9.9"),
        (200, json.dumps({"embq": "0.1.0", "indices": [INDEX]}).encode(), "other_version", "embq 0.1.0"),
        (200, json.dumps({**HEALTH, "indices": []}).encode(), "no_index", "serves no index yet"),
        (421, b'{"code": "wrong_host", "message": "not me\\u001b[2J", "next": "ask"}', "wrong_host", "not me"),
        (500, b'{"code": "X Y", "message": "a", "next": "b"}', "other_server", "HTTP 500"),
    ],
    ids=["html", "404", "redirect", "list", "health", "later", "earlier", "empty", "refused", "odd code"],
)
def test_what_else_may_answer_is_named(
    status: int, body: bytes, code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as url:
        told, found, message = search_refusal(capsys, url, "words")
    assert found == code
    assert said in message
    assert "\x1b" not in message
    assert told == {"other_server": Exit.UNAVAILABLE, "other_version": Exit.CONFIG}.get(code, Exit.BAD_INPUT)


def test_a_model_that_is_not_ready_is_told_and_may_be_asked_again_later(capsys: pytest.CaptureFixture[str]) -> None:
    health = json.dumps({**HEALTH, "indices": [INDEX]}).encode()
    said = {"code": "model_loading", "message": "the model is being loaded", "next": "ask again in a while"}
    with answering(200, health, search_status=503, search=said) as url:
        assert run(["search", url, "words"]) == Exit.TRY_LATER
        told = capsys.readouterr().err.splitlines()
        assert told[0] == "loading minilm ..."
        assert told[1] == f"error[model_loading]: {url}: the model is being loaded"
    with answering(200, health, search={"results": [{"rank": 1}]}) as url, pytest.raises(EmbqError) as refused:
        embq.search(url, "words")
    assert refused.value.code == "other_server"


def test_a_certificate_that_is_not_trusted_and_a_server_without_tls_are_told_apart(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, code, said = search_refusal(capsys, server.url.replace("http://", "https://"), "words")
    assert (status, code) == (Exit.UNAVAILABLE, "other_server")
    assert "not speak TLS" in said
    certificate = self_signed(tmp_path)
    with tls(certificate, server) as url:
        status, code, said = search_refusal(capsys, url, "words")
        assert (status, code) == (Exit.UNAVAILABLE, "untrusted_server")
        assert "SSL_CERT_FILE" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert answer(capsys, url, "text 7", "-k", "1")["results"][0]["key"] == "k7"  # type: ignore[index]


def self_signed(folder: Path) -> Path:
    """A certificate of localhost with its key, in one file."""
    path = folder / "server.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", "-", "-out", "-"]
    path.write_bytes(subprocess.run([*made, *names], capture_output=True, check=True).stdout)
    return path


@contextmanager
def tls(certificate: Path, behind: Server) -> Iterator[str]:
    """A proxy with TLS before a server, as people put one there."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, data: bytes | None) -> None:
            said = behind.ask(self.path, data=data)
            self.send_response(said.status)
            self.end_headers()
            self.wfile.write(said.data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(Proxy, tls=context) as port:
        yield f"https://localhost:{port}"
