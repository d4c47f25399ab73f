"""Requests to `embq serve` that cost it more than they cost their sender: bodies of many values, images of many scans.

Each route that reads a body gets each body at half of the size limit and at all of it. The server's processor time and
memory may at most double, and a small query is answered meanwhile.
"""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.routing import Route

from embq.core.errors import SampleError
from embq.core.rows.spec import RowSpec
from embq.retrieval.serving import app as app_module
from embq.retrieval.serving.embeddings import api as api_module
from embq.retrieval.serving.embeddings.api import EmbeddingApi
from embq.retrieval.serving.query_images import MAX_SCANNED_PIXELS
from embq.worker.embedders.image.headers import JPEG_MAX_SCANNED_PIXELS, check_file, scanned_pixels
from tests.e2e.served import Server, served
from tests.support.outputs.build import build, write_jsonl
from tests.support.outputs.index import build_index

BODIES: dict[str, Callable[[int], bytes]] = {
    "lists": lambda size: b"[" + b"[]," * (size // 3 - 2) + b"[]]",
    "objects": lambda size: b"[" + b"{}," * (size // 3 - 2) + b"{}]",
    "nested lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "keys": lambda size: b"{" + b"".join(b'"%07x":1,' % n for n in range(size // 12 - 2)) + b'"text":"a"}',
    "numbers": lambda size: b'{"embedding_input":[' + b"1," * (size // 2 - 20) + b"1]}",
    "long number": lambda size: b'{"text":' + b"9" * (size - 20) + b"}",
    "escapes": lambda size: b'{"text":"' + b"\\u0041" * (size // 6 - 10) + b'"}',
    "words": lambda size: b'{"inputs":["' + b'","'.join([b"a,b[c]:{d}"] * (size // 16)) + b'"],"input":"x"}',
    "image that is none": lambda size: b'{"image":"' + b"A" * (size // 4 * 4 - 40) + b'"}',
    "ids": lambda size: b'{"ids":[' + b"1," * (size // 2 - 20) + b"1]}",
}
"""What a body of about so many bytes holds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    texts = write_jsonl(folder / "texts.jsonl", [{"id": f"k{i}", "text": f"text {i}"} for i in range(40)])
    model = "stub:8?decode=1"
    root = build(folder / "docs", [texts], model=model, modalities=("text",), rows=RowSpec(normalize=True))
    build_index(root, output="text")
    with served(root, "--embeddings", "stub:8") as server:
        yield server


def spent(server: Server) -> tuple[float, int]:
    """Processor seconds of the server so far, and bytes of its highest memory since this was last called."""
    pid = server.command.process.pid
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return (int(fields[11]) + int(fields[12])) / 100, int(peak[1]) * 1024


def posting() -> dict[str, int]:
    """The routes of the searches and embeddings that read a body -> the limit of its bytes."""
    searches = app_module.Routes(*[None] * 5).all()  # type: ignore[arg-type]
    found = {route.path: app_module.MOST_BODY for route in searches if "POST" in (route.methods or ())}
    embeddings = [route for route in EmbeddingApi([]).routes if isinstance(route, Route)]
    return found | {route.path: api_module.MOST_BODY for route in embeddings if "POST" in (route.methods or ())}


def paths() -> list[Any]:
    """All of them; one that searches and one that embeds are quick tests."""
    quick = ("/knn-service", "/v1/embeddings")
    return [pytest.param(path, marks=[] if path in quick else [pytest.mark.slow]) for path in posting()]


def cost(server: Server, path: str, data: bytes) -> tuple[float, int]:
    """Processor seconds and bytes of memory that a body costs the server."""
    spent(server)
    before, baseline = spent(server)
    status = server.ask(path, data=data).status
    after, peak = spent(server)
    assert 400 <= status < 500 or status == 200, (path, status)
    return after - before, peak - baseline


@pytest.mark.parametrize("path", paths())
def test_a_body_costs_time_and_memory_in_proportion_to_its_bytes_at_most(path: str, server: Server) -> None:
    limit = posting()[path]
    for name, body in BODIES.items():
        half, whole = body(limit // 2), body(limit - 1000)
        assert len(whole) < limit, name
        half_s, _ = cost(server, path, half)
        for attempt in range(3):  # other processes disturb even processor time
            whole_s, whole_bytes = cost(server, path, whole)
            # The body, its copies while it is received and decoded, and the values that may be in it.
            if whole_s <= 2.6 * half_s + 0.2 and whole_bytes <= 6 * limit + (64 << 20):
                break
            assert attempt < 2, (path, name, half_s, whole_s, whole_bytes)


def test_a_small_query_is_answered_beside_many_bodies_of_many_values(server: Server) -> None:
    body = BODIES["lists"](app_module.MOST_BODY - 1000)
    spent(server)
    answers: list[int] = []
    senders = [
        threading.Thread(target=lambda: answers.append(server.ask("/knn-service", data=body).status)) for _ in range(8)
    ]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert server.ask("/knn-service", {"embedding_input": [1.0] * 8, "num_images": 3}).status == 200
    assert answers == [413] * 8
    _, peak = spent(server)
    assert peak < 1 << 30


def test_honest_bodies_of_many_values_are_taken(server: Server) -> None:
    numbers = [0.5] * 8
    assert server.ask("/search", {"vector": numbers, "k": 3}).status == 200
    assert server.ask("/metadata", {"ids": list(range(40)) * 250}).status == 200
    code = "def f(a, b): return {'a': [a, b]}  # " * 50
    assert server.ask("/v1/embeddings", {"input": [code] * 500}).status == 200
    assert server.ask("/embed", {"inputs": ["a, b: [c]"] * 2_048}).status == 200


# --- images ---


def with_scans(side: tuple[int, int], scans: int) -> bytes:
    """A progressive JPEG of a plain colour, whose last scan is repeated."""
    file = io.BytesIO()
    Image.new("L", side, 128).save(file, "JPEG", progressive=True, quality=30)
    data = file.getvalue()
    at = [match.start() for match in re.finditer(rb"\xff\xda", data)]
    last = data[at[-1] : -2]
    return data[:-2] + last * (scans - len(at)) + data[-2:]


@pytest.mark.parametrize(("side", "scans", "taken"), [((4000, 4000), 64, True), ((8000, 7900), 64, False)])
def test_pixels_times_scans_of_a_jpeg_are_bounded(side: tuple[int, int], scans: int, taken: bool) -> None:
    data = with_scans(side, scans)
    assert scanned_pixels(data) == side[0] * side[1] * scans
    assert (side[0] * side[1] * scans <= JPEG_MAX_SCANNED_PIXELS) == taken
    if taken:
        assert check_file(data) is not None
    else:
        with pytest.raises(SampleError) as refused:
            check_file(data)
        assert refused.value.code == "too_large"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over images of a stub that decodes them."""
    from tests.support.outputs.build import write_folder
    from tests.support.picture_files import encoded

    folder = tmp_path_factory.mktemp("pictures")
    images = {f"{n}.png": encoded(Image.new("RGB", (32, 32), (n, 0, 0)), "PNG") for n in range(8)}
    source = write_folder(folder / "photos", images)
    root = build(folder / "out", [source], model="stub:8?decode=1", modalities=("image",), rows=RowSpec(normalize=True))
    build_index(root, output="image")
    with served(root) as server:
        yield server


def test_an_image_of_many_scans_is_refused_and_one_that_takes_long_holds_up_no_other(pictures: Server) -> None:
    def asked(data: bytes) -> Any:
        return pictures.ask("/knn-service", {"image": base64.b64encode(data).decode(), "num_images": 1})

    small = with_scans((64, 64), 10)
    assert asked(small).status == 200
    refused = asked(with_scans((4000, 4000), 64))
    assert refused.status == 400, refused.data
    assert refused.json["code"] == "too_large"
    costly = with_scans((4000, 3900), MAX_SCANNED_PIXELS // (4000 * 3900))
    statuses: list[int] = []
    senders = [threading.Thread(target=lambda: statuses.append(asked(costly).status)) for _ in range(4)]
    for sender in senders:
        sender.start()
    beside = 0
    while any(sender.is_alive() for sender in senders):
        assert asked(small).status == 200
        beside += 1
    assert statuses == [200] * 4
    # One at a time with the model, no more than one would be answered for each of the costly ones.
    assert beside > 8
    assert np.isfinite(json.loads(asked(small).data)[0]["similarity"])
