"""Every page over every kind of run, through the ASGI application: 200, or the page's own form of error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.core.networks import HostNames
from embq.core.rows.metadata import INDEX_COLUMNS, RESERVED
from embq.core.rows.spec import RowSpec
from embq.core.run.run_info import load_run
from embq.retrieval.serving.app import application
from embq.retrieval.serving.middleware import AccessRules
from embq.retrieval.ui.fleet import pages
from embq.retrieval.ui.fleet.pages import FleetPages
from embq.retrieval.ui.fleet.sources import sources_of
from embq.retrieval.ui.rendering import StaticFilesOfPages, error_page
from embq.retrieval.ui.site import Site
from tests.support.outputs.build import build, write_folder, write_jsonl, write_tar
from tests.support.outputs.index import build_index
from tests.support.waiting import wait_until
from tests.ui.thumbnail_server import image_of

UNIT = RowSpec(normalize=True)
ROWS = 60
"""More than a page has, so that there is a further one."""
PLAIN: list[object] = [{"id": f"row-{i}", "text": f"text number {i}"} for i in range(ROWS)]


def _texts(folder: Path, name: str, lines: list[object] = PLAIN, **options: object) -> Path:
    inputs = [write_jsonl(folder / f"{name}.jsonl", lines)]
    options = {"model": "stub:16", "rows": UNIT, "unit_samples": 20, **options}
    return build(folder / name, inputs, **options)  # type: ignore[arg-type]


def _texts_with_metadata(folder: Path, name: str) -> Path:
    values = (None, True, "a <b>", {"deep": [1]}, ["x"])
    lines = [{**one, "year": 1999 + i, "any": values[i % 5]} for i, one in enumerate(PLAIN) if isinstance(one, dict)]
    return _texts(folder, name, [*lines])


def _own_names(folder: Path, name: str) -> Path:
    lines = [{**dict.fromkeys(sorted({*RESERVED, *INDEX_COLUMNS}), str(i)), **one} for i, one in enumerate(PLAIN)]  # type: ignore[dict-item]
    return _texts(folder, name, [*lines])


def _some_fail(folder: Path, name: str) -> Path:
    return _texts(folder, name, [*PLAIN[:30], {"id": "empty", "text": ""}, b"{torn\n"])


def _image_tar(folder: Path, name: str) -> Path:
    members = [
        member
        for i in range(ROWS)
        for member in ((f"{i:03}.jpg", image_of(i, size=(64, 40))), (f"{i:03}.txt", f"picture {i}".encode()))
    ]
    shard = write_tar(folder / f"{name}.tar", members)
    return build(folder / name, [shard], model="stub:16", modalities=("image", "text"), rows=UNIT, unit_samples=20)


def _image_folder(folder: Path, name: str) -> Path:
    files = {f"{i % 3}/{i:03}.jpg": image_of(i, size=(64, 40)) for i in range(ROWS)}
    pictures = write_folder(folder / f"{name}-files", files)
    return build(folder / name, [pictures], model="stub:16", modalities=("image",), rows=UNIT, unit_samples=20)


def _chunks(folder: Path, name: str) -> Path:
    source = write_jsonl(folder / f"{name}.jsonl", [{"id": str(i), "text": "some words " * 60} for i in range(12)])
    command = ["run", str(source), "-o", str(folder / name), "-m", "stub:16", "--chunk-tokens", "32"]
    assert run([*command, "--normalize", "--devices", "cpu", "--quiet"]) == Exit.DONE
    return folder / name


def _no_rows(folder: Path, name: str) -> Path:
    return _texts(folder, name, [{"id": str(i), "text": ""} for i in range(5)])


KINDS: dict[str, tuple[Callable[[Path, str], Path], tuple[str, ...]]] = {
    "texts": (_texts, ("text",)),
    "texts-with-metadata": (_texts_with_metadata, ("text",)),
    "own-names": (_own_names, ("text",)),
    "some-fail": (_some_fail, ("text",)),
    "npy": (partial(_texts, format="npy"), ("text",)),
    "hdf5": (partial(_texts, format="hdf5"), ("text",)),
    "arrow": (partial(_texts, format="arrow"), ("text",)),
    "image-tar": (_image_tar, ("image", "text")),
    "image-folder": (_image_folder, ("image",)),
    "two-models": (partial(_texts, model=("a=stub:16", "b=stub:8")), ("a", "b")),
    "chunks": (_chunks, ("text",)),
    "no-rows": (_no_rows, ()),
    "going": (partial(_texts, only=2), ()),
}
"""Name of a run -> what makes it, and the outputs of which it has indexes."""

SERVED = [(kind, output) for kind, (_, outputs) in KINDS.items() for output in outputs]

PAGES: dict[str, dict[str, object]] = {
    "first rows": {},
    "by text": {"q": "text number 7"},
    "by id": {"id": 3},
    "by example": {"like": "1,2", "unlike": 3},
    "further page": {"id": 3, "offset": 48},
    "past the end": {"id": 3, "offset": 4800},
    "condition": {"id": 3, "where": "key != row-1"},
    "condition alone": {"where": "key != row-1"},
    "details": {"id": 3, "row": 2},
}
"""Page of the search -> fields of its address."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every-page")
    for kind, (make, outputs) in KINDS.items():
        root = make(folder, kind)
        for output in outputs:
            build_index(root, output=output)
    assert run(["atlas", str(folder / "texts"), "--no-serve"]) == Exit.DONE
    return folder


def opened(stack: ExitStack, *folders: Path) -> TestClient:
    """A client of the pages over all that is below the folders."""
    named = [str(one) for one in folders]
    app = application(
        named,
        [],
        follow=True,
        memory="ram",
        threads=1,
        with_models=True,
        image_urls=False,
        rules=AccessRules(hosts=HostNames(["testserver"])),
        try_decoding=len,
        site=partial(Site, fleet=FleetPages(sources_of(named, ""))),
        error_page=error_page,
    )
    return stack.enter_context(TestClient(app, raise_server_exceptions=False))


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        client = opened(stack, folder)

        def ready() -> bool:
            states = [one["model_state"] for one in client.get("/health").json()["indices"]]
            return len(states) == len(SERVED) and set(states) == {"ready"}

        wait_until(ready, 60)
        yield client


def index_of(client: TestClient, kind: str, output: str) -> tuple[str, str]:
    """(name, modality) of the index of an output, as `/health` lists it."""
    found = [one for one in client.get("/health").json()["indices"] if kind == one["name"].split("/")[0]]
    (one,) = [one for one in found if one["output"] == output] if len(found) > 1 else found
    return one["name"], one["modality"]


def assert_page(client: TestClient, path: str, status: int = 200, **headers: str) -> str:
    answer = client.get(path, headers=headers)
    assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text[:300]}"
    assert answer.headers["content-type"].startswith("text/html")
    assert "embq has a bug" not in answer.text
    return answer.text


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("kind", "output"), SERVED)
def test_the_search_page(client: TestClient, kind: str, output: str, page: str) -> None:
    name, modality = index_of(client, kind, output)
    path = "/?" + urlencode({"index": f"{name}:{modality}", **PAGES[page]})
    status = 400 if page == "condition alone" else 200
    whole = assert_page(client, path, status)
    part = assert_page(client, path, **{"hx-request": "true", "hx-target": "results"})
    empty = page in ("condition alone", "past the end") or (page == "further page" and kind in ("some-fail", "chunks"))
    for text in (whole, part):
        assert ('class="result"' in text) == (not empty)
        assert ('<a class="picture"' in text) == (not empty and modality == "image")
        assert ('role="alert"' in text) == (page == "condition alone")


@pytest.mark.parametrize("kind", KINDS)
def test_the_pages_of_a_run(client: TestClient, folder: Path, kind: str) -> None:
    info = load_run(folder / kind)
    wait_until(lambda: info.run in client.get("/fleet").text, 30)
    assert kind in assert_page(client, "/fleet")
    page = assert_page(client, f"/fleet/{info.run}")
    assert kind in page
    assert ('class="failed"' in page, "% failed<" in page) == (kind in ("some-fail", "no-rows"),) * 2
    groups = assert_page(client, f"/ui/fleet/failures/{info.run}")
    assert ("group" in groups) == (kind in ("some-fail", "no-rows"))
    for sample in re.findall(r'hx-get="(/ui/fleet/sample/[^"]+)"', groups):
        assert_page(client, sample)
    history = client.get(f"/ui/fleet/history/{info.run}")
    assert (history.status_code, history.headers["content-type"]) == (200, "application/json")


@pytest.mark.parametrize(("kind", "output"), SERVED)
def test_the_map_and_the_thumbnails_of_an_index(client: TestClient, kind: str, output: str) -> None:
    name, modality = index_of(client, kind, output)
    query = urlencode({"index": f"{name}:{modality}"})
    assert ("has no map yet" in assert_page(client, f"/map?{query}")) == (kind != "texts")
    assert client.get(f"/map/points?{query}").status_code == (200 if kind == "texts" else 400)
    thumbnail = client.get(f"/thumb/{name}/{modality}/3")
    is_picture = kind.startswith("image")
    assert thumbnail.status_code == (200 if is_picture else 404)
    assert thumbnail.headers["content-type"] == ("image/jpeg" if is_picture else "application/json")


@pytest.mark.parametrize("kind", ["no-rows", "going", ""])
def test_pages_without_an_index(folder: Path, tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        client = opened(stack, folder / kind if kind else tmp_path)
        for page in PAGES.values():
            assert "There is no index yet" in assert_page(client, "/?" + urlencode(page))
        assert "There is no index yet" in assert_page(client, "/map")
        assert_page(client, "/fleet")
        assert "there is no run" in assert_page(client, "/fleet/nothing", 404, **BROWSER)
        assert client.get("/thumb/x/image/0").headers["content-type"] == "application/json"


BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"}

WRONG: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "no route": ("GET", "/nothing", 404, {}),
    "a route for programs": ("GET", "/search", 405, {}),
    "a route for forms": ("GET", "/ui/runs/x/pause", 405, {}),
    "no file": ("GET", "/static/nothing.js", 404, {}),
    "no run": ("GET", "/fleet/nothing", 404, {}),
    "no charts": ("GET", "/ui/fleet/history/nothing", 404, {}),
    "another token": ("GET", "/fleet?token=x", 403, {}),
    "no actions": ("POST", "/ui/runs/x/pause", 403, {}),
    "another page": ("POST", "/ui/image", 403, {"origin": "http://evil.example"}),
    "no original": ("GET", "/thumb/texts/text/3?size=original", 404, {}),
    "no size": ("GET", "/thumb/texts/text/3?size=vast", 400, {}),
    "no upload": ("GET", "/ui/image/0123", 404, {}),
    "no map": ("GET", "/map/points?index=nothing:text", 404, {}),
    "no index": ("GET", "/?index=nothing:text", 404, {}),
}
"""Request of a browser -> method, path, status, headers."""


@pytest.mark.parametrize("what", WRONG)
def test_an_error_is_a_page_for_a_browser_a_notice_for_a_part_of_a_page_and_json_for_a_program(
    client: TestClient, what: str
) -> None:
    method, path, status, headers = WRONG[what]
    page = client.request(method, path, headers={**BROWSER, **headers})
    assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert 'aria-label="Pages"' in page.text
    assert re.search(r'role="alert"><h[12]>.+</h[12]><p>.+</p>', page.text), page.text
    if path.startswith("/?"):
        return  # its errors are a part of it
    notice = client.request(method, path, headers={"hx-request": "true", **headers})
    assert notice.status_code == status
    assert notice.text.startswith('<div class="notice error"')
    for accept in ("application/json", "*/*"):
        answer = client.request(method, path, headers={"accept": accept, **headers})
        assert (answer.status_code, set(answer.json())) == (status, {"code", "message", "next"})


def test_a_broker_that_is_away_is_a_page_with_a_next_step(tmp_path: Path) -> None:
    app = application(
        [str(tmp_path)],
        [],
        follow=True,
        memory="ram",
        threads=1,
        with_models=False,
        image_urls=False,
        rules=AccessRules(hosts=HostNames(["testserver"])),
        try_decoding=len,
        site=partial(Site, fleet=FleetPages(sources_of([], "redis://127.0.0.1:1"), allow_actions=True)),
        error_page=error_page,
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        assert "does not answer" in assert_page(client, "/fleet", **BROWSER)
        assert "does not answer" in assert_page(client, "/fleet/0123456789abcdef", 503, **BROWSER)


def test_a_folder_that_vanishes_is_a_page_with_a_next_step(folder: Path, tmp_path: Path) -> None:
    for name in ("texts", "image-tar"):
        shutil.copytree(folder / name, tmp_path / "runs" / name)
    runs = [load_run(tmp_path / "runs" / name).run for name in ("texts", "image-tar")]
    with ExitStack() as stack:
        client = opened(stack, tmp_path / "runs")
        wait_until(lambda: all(run in client.get("/fleet").text for run in runs), 30)
        indices = [f"{one['name']}:{one['modality']}" for one in client.get("/health").json()["indices"]]
        shutil.rmtree(tmp_path / "runs")
        paths = ["/fleet", "/map", *(f"{path}{run}" for path in ("/fleet/", "/ui/fleet/failures/") for run in runs)]
        paths += [
            f"/{page}?{urlencode({'index': index, **more})}"
            for index in indices
            for page in ("", "map")
            for more in ({}, {"id": 3})
        ]
        paths += [f"/thumb/{index.replace(':', '/')}/3?size=original" for index in indices]
        for path in paths:
            answer = client.get(path, headers=BROWSER)
            assert "embq has a bug" not in answer.text, path
            if answer.status_code >= 400:
                assert answer.headers["content-type"].startswith("text/html"), path
                assert re.search(r'role="alert"><h[12]>.+</h[12]><p>.+</p>', answer.text), (path, answer.text)


def test_a_bug_behind_files_is_a_page_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StaticFilesOfPages, "file_response", lambda *_, **__: 1 / 0)
    with ExitStack() as stack:
        answer = opened(stack, folder / "texts").get("/static/embq.css", headers=BROWSER)
    assert (answer.status_code, answer.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert "report it with those lines of the log" in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_an_unexpected_error_is_a_page_that_names_its_line_of_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "parts_of", lambda *_: 1 / 0)
    with ExitStack() as stack:
        answer = opened(stack, folder / "texts").get("/fleet", headers=BROWSER)
    assert answer.status_code == 500
    assert answer.headers["content-type"].startswith("text/html")
    number = re.search(r"id=([0-9a-f]{8})", answer.text)
    assert number is not None
    assert f"id={number[1]}" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "ZeroDivisionError" not in answer.text
