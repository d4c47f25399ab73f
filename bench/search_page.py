"""The search page in a browser: first paint, and a text query until its thumbnails stand, over many rows in tars.

    python -m bench.search_page [--rows 1000000] [--folder bench/cache/search-page]

The rows are small photographs in webdataset shards, embedded by the stub, with captions; what is measured depends on
their number and on the tars, not on the model. Where `make bench-images` has installed clip-retrieval's front end, the
same query is typed into that too, against the same server. Needs Debian's package chromium.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.pages import pages_of
from bench.report import table, write
from examples.demo.collect import photographs
from tests.ui.browser import opened_page, started_browser, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Response

PAINT_BAR_S, ANSWER_BAR_S, WEIGHT_BAR = 0.3, 1.0, 250_000
"""Bars: first paint, answer of a warm text query with thumbnails, bytes of a page without pictures."""

SHARD_ROWS = 10_000
DISTINCT = 300
"""Photographs that the shards repeat; each row has a key and a caption of its own."""

WARM_S = 60.0
"""For a million rows: the server walks through their shards half of the time."""

MODEL = "stub:64"
QUERIES = tuple(f"a photograph of {thing} {time.time_ns()}" for thing in ("coffee", "a cat", "the moon", "bricks"))
"""New ones in each call: thumbnails that were made before are in the cache on disk."""

FRONT = Path(".venv-bench")


def main() -> int:
    """Measure, print a table and write the figures; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.search_page")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("bench/cache/search-page"))
    given = parser.parse_args()
    root = prepared(given.folder / f"{given.rows}", given.rows)
    with static_front() as front, started_browser() as browser:
        origin = () if front is None else ("--allow-origin", front)
        with pages_of(root, *origin) as url:
            figures: dict[str, Any] = {"rows": given.rows, **ours(browser, url, given.rows)}
            if front is not None:
                figures["clip_retrieval_front"] = theirs(browser, front, url)
    rows = [
        ("first paint, s", f"{figures['first_paint_s']:.3f}", f"<= {PAINT_BAR_S}"),
        ("text query with all thumbnails in view, median s", f"{figures['answer_s']:.3f}", f"<= {ANSWER_BAR_S}"),
        ("the same right after the start of the server, s", f"{figures['answer_at_once_s']:.3f}", ""),
        ("page without pictures, bytes", f"{figures['page_bytes']:,}", f"<= {WEIGHT_BAR:,}"),
    ]
    if front is not None:
        theirs_s = figures["clip_retrieval_front"]["answer_s"]
        rows.append(("the same query in clip-retrieval's front end, median s", f"{theirs_s:.3f}", ""))
    table(("", "measured", "bar"), rows)
    write("search_page", figures)
    return 0


def prepared(folder: Path, rows: int) -> Path:
    """The output folder of a run over that many images in tars, with its index; made once."""
    root, shards = folder / "photographs", folder / "shards"
    if (root / "index" / "image" / "CURRENT").exists():
        return folder
    shards.mkdir(parents=True, exist_ok=True)
    made = [small(data) for _, data in photographs(DISTINCT, seed=5)]
    for number in range(-(-rows // SHARD_ROWS)):
        path = shards / f"{number:05d}.tar"
        if not path.exists():
            path.write_bytes(shard(number * SHARD_ROWS, min(rows, (number + 1) * SHARD_ROWS), made))
    command = [sys.executable, "-m", "embq"]
    inputs = [str(path) for path in sorted(shards.glob("*.tar"))]
    subprocess.run([*command, "run", *inputs, "-o", root, "-m", MODEL, "--modality", "image", "-q"], check=True)
    # Random vectors have no neighbours to speak of, and so no recall to reach.
    subprocess.run([*command, "index", root, "--recall", "0.5", "-q"], check=False)
    return folder


def small(data: bytes) -> bytes:
    """A photograph as a JPEG of at most 160 pixels."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.thumbnail((160, 160))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=75)
    return encoded.getvalue()


def numbered(jpeg: bytes, row: int) -> bytes:
    """A JPEG with a comment, so that the stub gives each row a vector of its own."""
    comment = f"{row:012d}".encode()
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


def shard(first: int, last: int, made: list[bytes]) -> bytes:
    """A shard of rows `first` to `last` - 1."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for row in range(first, last):
            image = numbered(made[row % len(made)], row)
            for ending, content in (("jpg", image), ("txt", f"photograph number {row}".encode())):
                member = tarfile.TarInfo(f"{row:08d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def ours(browser: Browser, url: str, rows: int) -> dict[str, Any]:
    """Figures of the search page: of a query right after the start, and of others once the shards are looked into."""
    with opened_page(browser) as (page, _):
        received: list[Response] = []
        page.on("response", lambda one: received.append(one))
        page.goto(url, wait_until="load")
        weight = sum(len(one.body()) for one in [*received] if "/thumb/" not in one.url)
        paints, answers = [], []
        first = asked(page, QUERIES[0])
        time.sleep(WARM_S * rows / 1_000_000)
        for query in QUERIES[1:]:
            page.goto(url, wait_until="load")
            page.wait_for_timeout(300)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"))
            answers.append(asked(page, query))
    return {
        "first_paint_s": statistics.median(paints),
        "answer_at_once_s": first,
        "answer_s": statistics.median(answers),
        "answers_s": answers,
        "page_bytes": weight,
    }


def asked(page: Page, query: str) -> float:
    """Seconds from Enter until all thumbnails in view are drawn."""
    page.fill("#q", query)
    began = time.perf_counter()
    page.keyboard.press("Enter")
    page.wait_for_selector(".score")
    until(page, ALL_DRAWN)
    return time.perf_counter() - began


ALL_DRAWN = """[...document.querySelectorAll(".picture img")]
    .filter((one) => one.getBoundingClientRect().top < innerHeight)
    .every((one) => one.complete && one.naturalWidth > 1)"""
"""True once each thumbnail in view is drawn."""


@contextmanager
def static_front() -> Iterator[str | None]:
    """The origin of clip-retrieval's front end on a server of its own; None where it is not installed."""
    found = next(FRONT.glob("lib/python*/site-packages/front/build"), None)
    if found is None:
        yield None
        return
    handler = functools.partial(Quiet, directory=str(found))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that logs nothing."""

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


def theirs(browser: Browser, front: str, url: str) -> dict[str, Any]:
    """The same queries in clip-retrieval's front end, until its results stand; it has pictures only by their URLs."""
    answers = []
    address = f"{front}/?{urllib.parse.urlencode({'back': url, 'index': 'photographs'})}"
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    for query in QUERIES:
        page.goto(address, wait_until="load")
        page.wait_for_timeout(300)
        page.fill("#searchBar", query)
        began = time.perf_counter()
        page.keyboard.press("Enter")
        page.wait_for_selector("#products figure", state="attached")
        answers.append(time.perf_counter() - began)
    context.close()
    return {"answer_s": statistics.median(answers[1:]), "answers_s": answers}


if __name__ == "__main__":
    sys.exit(main())
