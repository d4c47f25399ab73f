"""`embq serve --embeddings`: clients of OpenAI's API and of text-embeddings-inference get the vectors of a run."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest
from e2e.served import Server, served

import embq

TEXTS = [f"{thing} number {n}" for n in range(40) for thing in ("a cat", "the moon and all of its craters")]
LONG = "word " * 2_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served("--embeddings", "minilm", "--embeddings", "slow=stub:8?ms_per_sample=100", "--device", "cpu") as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    vectors: np.ndarray = embq.embed(TEXTS, "minilm", devices="cpu")
    return vectors


def test_the_client_of_openai_gets_the_vectors_of_a_run(server: Server, expected: np.ndarray) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="minilm", input=TEXTS)
        found = np.array([one.embedding for one in answer.data], np.float32)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert answer.usage.prompt_tokens > 3 * len(TEXTS)
        assert [one.id for one in client.models.list().data] == ["minilm", "slow"]
        with pytest.raises(openai.NotFoundError, match="use one of: minilm, slow"):
            client.embeddings.create(model="text-embedding-3-small", input="a")
        with pytest.raises(openai.BadRequestError, match="input 1 cannot be embedded"):
            client.embeddings.create(model="minilm", input=["a", " "])


def test_both_encodings_and_fewer_dimensions(server: Server, expected: np.ndarray) -> None:
    body = {"model": "minilm", "input": TEXTS[0]}
    plain = server.ask("/v1/embeddings", body).json["data"][0]["embedding"]
    np.testing.assert_allclose(plain, expected[0], atol=2e-6)
    coded = server.ask("/v1/embeddings", {**body, "encoding_format": "base64"}).json["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.float32(plain))
    short = server.ask("/v1/embeddings", {**body, "dimensions": 16}).json["data"][0]["embedding"]
    np.testing.assert_allclose(short, expected[0, :16] / np.linalg.norm(expected[0, :16]), atol=2e-6)


def test_clients_of_text_embeddings_inference(server: Server, expected: np.ndarray) -> None:
    found = server.ask("/embed", {"inputs": TEXTS[:3]}).json
    np.testing.assert_allclose(found, expected[:3], atol=2e-6)
    refused = server.ask("/embed", {"inputs": [LONG]})
    assert (refused.status, refused.json["error_type"]) == (413, "Validation")
    assert server.ask("/embed", {"inputs": LONG, "truncate": True}).status == 200
    assert server.ask("/v1/embeddings", {"model": "minilm", "input": LONG}).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"model": "minilm"},
        {"model": "minilm", "input": []},
        {"model": "minilm", "input": [[1, 2, 3]]},
        {"model": "minilm", "input": [1, 2]},
        {"model": "minilm", "input": "a", "dimensions": 0},
        {"model": "minilm", "input": "a", "dimensions": 385},
        {"model": "minilm", "input": "a", "encoding_format": "int8"},
        {"model": "minilm", "input": "a", "surprise": 1},
        {"model": ["minilm"], "input": "a"},
        {"model": "minilm", "input": ["a"] * 2_049},
        {"model": "minilm", "input": {"a": 1}},
        "no object",
    ],
)
def test_what_cannot_be_answered_is_refused_in_their_form(server: Server, body: object) -> None:
    answer = server.ask("/v1/embeddings", body)
    assert 400 <= answer.status < 500
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"]


def test_bytes_that_are_no_json_and_bodies_without_end(server: Server) -> None:
    for data in (b"{", b"\xff\xfe", b'{"input": "\\ud800", "model": "minilm"}', b"[" * 100_000, b"9" * 9_000_000):
        answer = server.ask("/v1/embeddings", data=data)
        assert 400 <= answer.status < 500, data[:20]
    assert server.ask("/v1/embeddings", {"model": "minilm", "input": "a"}, Host="evil.example").status == 421


def test_many_clients_at_once_get_their_own_vectors(server: Server, expected: np.ndarray) -> None:
    def ask(number: int) -> float:
        found = server.ask("/v1/embeddings", {"model": "minilm", "input": TEXTS[number]}).json["data"][0]["embedding"]
        return float(np.abs(np.float32(found) - expected[number]).max())

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(ask, range(len(TEXTS)))) < 2e-6


def test_the_work_of_a_client_that_has_gone_is_dropped_and_too_much_is_refused(server: Server) -> None:
    parts = urlsplit(server.url)
    body = json.dumps({"model": "slow", "input": [f"t {n}" for n in range(2_000)]})
    gone = [http.client.HTTPConnection(parts.hostname or "", parts.port) for _ in range(9)]
    for connection in gone:
        connection.request("POST", "/v1/embeddings", body)
    time.sleep(1.0)
    answer = server.ask("/v1/embeddings", {"model": "slow", "input": ["x"] * 2_000})
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    for connection in gone:
        connection.close()
    began = time.monotonic()
    asked = threading.Thread(target=server.ask, args=("/v1/embeddings", {"model": "slow", "input": "y"}))
    asked.start()
    asked.join(60)
    assert time.monotonic() - began < 60, "what nobody waits for takes half an hour"
