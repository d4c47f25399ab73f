"""Every page over folders with hostile names in every field: no address, attribute or script is made of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.testclient import TestClient

from embq.app.cli.entry_point import run
from embq.core.errors import Exit, MalformedError
from embq.core.networks import HostNames
from embq.core.rows.spec import RowSpec
from embq.core.run.commits import Commit
from embq.core.run.run_info import load_run
from embq.retrieval.serving.app import application
from embq.retrieval.serving.middleware import AccessRules
from embq.retrieval.ui.addresses import Values, url
from embq.retrieval.ui.fleet.pages import FleetPages
from embq.retrieval.ui.fleet.sources import sources_of
from embq.retrieval.ui.rendering import HERE, error_page
from embq.retrieval.ui.site import Site
from tests.support.outputs.build import build, reseal, write_jsonl, write_log, write_tar
from tests.support.outputs.index import build_index
from tests.support.waiting import wait_until
from tests.ui.thumbnail_server import image_of

NAME = "x..%2f\"'><img src=x onerror=x><b id=pwned>?a=b&c=d#e;\u202e"
"""A hostile name of a folder."""
TEXT = f"{NAME}/../../../../ui/image/0?x=/thumb/a/image/0"
"""One that has slashes, too."""

ADDRESSES = {
    *("href", "src", "srcset", "action", "formaction", "ping", "poster", "xlink:href", "sse-connect"),
    *("hx-get", "hx-post", "hx-put", "hx-delete", "hx-patch", "data-history", "data-thumbnails"),
}
"""Attributes that hold an address; scripts fetch the last two."""

INSERTED = {"/", "/ui/fleet/failures/{run}", "/ui/fleet/logs/{run}", "/ui/fleet/sample/{run}/{unit}/{ordinal:int}"}
"""Routes that a page asks for what it inserts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs below a folder, with an index each, a map, and failures that name other routes as their units."""
    folder = tmp_path_factory.mktemp("hostile")
    lines: list[object] = [
        {"id": f"{i}{TEXT}", "text": f"{i} {TEXT}", NAME: TEXT, "link": f"http://x/{i}\"onclick='x'"} for i in range(9)
    ]
    texts = write_jsonl(folder / f"{NAME}.jsonl", [*lines, {"id": TEXT, "text": ""}])
    rows = RowSpec(normalize=True)
    notes = build(folder / "runs" / f"{NAME} texts", [texts], model="stub:16", rows=rows)
    shard = write_tar(folder / f"{NAME}.tar", [(f"{i}{NAME[6:]}.jpg", image_of(i)) for i in range(3)])
    pictures = build(folder / "runs" / f"{NAME} pictures", [shard], model="stub:16", modalities=("image",), rows=rows)
    build_index(notes, output="text")
    build_index(pictures, output="image")
    assert run(["atlas", str(notes), "--no-serve", "--method", "pca"]) == Exit.DONE
    (file,) = (notes / "failures").iterdir()
    table = pq.read_table(file)
    for name in ("unit_id", "key", "code", "message"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.array([f"../../../ui/image/{'0' * 32}?{TEXT}"] * table.num_rows))
    pq.write_table(table, file)
    size = file.stat().st_size

    def resized(record: Commit) -> Commit:
        files = [replace(one, bytes=size) if one.kind == "failures" else one for one in record.files]
        return replace(record, files=tuple(files))

    reseal(notes, resized)  # as the author can
    write_log(notes, "worker", f"2026-01-01T00:00:00Z info {TEXT}")
    return folder / "runs"


@pytest.fixture(scope="module")
def app(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Starlette, TestClient]]:
    """The server of the pages, whose client has come with the token."""
    named = [str(folder)]
    fleet = FleetPages(sources_of(named, ""), allow_actions=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        app = application(
            named,
            [],
            follow=True,
            memory="ram",
            threads=1,
            with_models=False,
            image_urls=False,
            rules=AccessRules(hosts=HostNames(["testserver"])),
            try_decoding=len,
            site=partial(Site, fleet=fleet),
            error_page=error_page,
        )
        with TestClient(app, raise_server_exceptions=False) as client:
            wait_until(lambda: len(client.get("/indices-list").json()) == 2)
            wait_until(lambda: client.get("/fleet").text.count('<li class="run"') == 2, 30)
            client.get(f"/fleet?token={fleet.token}")
            yield app, client


class Addresses(HTMLParser):
    """Collects (tag, attribute, address) of a page, and what no page may have."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.wrong: list[tuple[str, str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ADDRESSES:
                self.found.append((tag, name, value or ""))
            elif not re.fullmatch(r"(?!on|style|srcdoc)[a-z]+(-[a-z]+)*", name) or value == "pwned":
                self.wrong.append((tag, name, value))
        if tag in ("iframe", "object", "embed", "base"):
            self.wrong.append((tag, "", ""))


def routes_of(app: Starlette) -> list[tuple[Route | Mount, list[str]]]:
    """Each route, and the names of its parameters."""
    found = []
    for route in app.routes:
        assert isinstance(route, Route | Mount)
        found.append((route, re.findall(r"{(\w+)(?::\w+)?}", route.path)))
    return found


def assert_plain(app: Starlette, html: str, at: str, runs: set[str]) -> None:
    """The addresses of a page are those of routes that it may ask for, with values of their own types."""
    page = Addresses(html)
    assert page.wrong == [], at
    for tag, name, value in page.found:
        where = f"{at}: {tag} {name}={value!r}"
        if value == "#content" or (name == "src" and value.startswith("data:image/jpeg;base64,")):
            continue
        if tag == "a" and re.fullmatch(r"https?://[!-~]+", value):
            continue  # a link that a row has, in a page of its own
        assert re.fullmatch(r"[A-Za-z0-9/._~%?&=+*-]+", value), where
        path = urlsplit(value).path
        once = unquote(path)  # as servers and browsers read it
        assert value.startswith("/"), where
        assert normpath(path).rstrip("/") == path.rstrip("/"), where
        scope = {
            "type": "http",
            "method": "POST" if name == "hx-post" else "GET",
            "path": once + "0" * (name == "data-thumbnails"),
        }
        matches = [(route, route.matches(scope | {"headers": []})) for route, _ in routes_of(app)]
        route, (_, child) = next((route, match) for route, match in matches if match[0] == Match.FULL)
        given = child.get("path_params", {})
        if tag == "script":
            assert route.path == "/static", where
        if name == "hx-get":
            assert route.path in INSERTED, where
        if name == "hx-post":
            assert route.path in ("/ui/runs/{run}/{verb}", "/map/make"), where
        if name == "sse-connect":
            assert route.path == "/ui/fleet/events", where
        assert given.get("run") in {None, *runs}, where
        assert re.fullmatch("[0-9a-f]{32}", given.get("unit", "0" * 32)), where


def assert_secured(answer: Response | Any, at: str) -> None:
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; "), at
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0], at
    assert answer.headers["x-content-type-options"] == "nosniff", at


def asked(app: Starlette, values: dict[str, list[object]], queries: dict[str, list[str]]) -> Iterator[str]:
    """An address of each route for each value of its parameters, and for each query."""
    for route, names in routes_of(app):
        assert set(names) <= values.keys(), f"{route.path}: give it values here"
        longest = max([len(values[name]) for name in names], default=1)
        for turn in range(longest):
            path = re.sub(r":\w+}", "}", route.path)
            given = {name: quote(str(values[name][turn % len(values[name])]), safe="/") for name in names}
            for query in queries.get(route.path, [""]):
                yield path.format(**given) + query
    yield f"/{quote(TEXT)}"


def test_every_route_has_a_policy_and_no_page_has_an_address_made_of_data(
    app: tuple[Starlette, TestClient], folder: Path
) -> None:
    server, client = app
    runs = {load_run(root).run for root in folder.iterdir()}
    names = client.get("/indices-list").json()
    unit = re.search(
        r"/ui/fleet/sample/\w+/(\w+)/", "".join(client.get(f"/ui/fleet/failures/{run}").text for run in runs)
    )
    assert unit is not None, [client.get(f"/ui/fleet/failures/{run}").text for run in runs]
    values: dict[str, list[object]] = {
        "run": [*runs, TEXT, ".."],
        "verb": ["pause", "retry", NAME],
        "unit": [unit[1], TEXT, ".."],
        "ordinal": [9, 0],
        "index": [*names, TEXT, ".."],
        "modality": ["text", "image", NAME],
        "id": [0, 1, 10**9],
        "token": ["0" * 32, NAME],
        "name": [TEXT],
        "path": ["embq.css", TEXT],
    }
    each = [f"index={quote(name)}:{modality}" for name in names for modality in ("text", "image")]
    search = [
        f"?{index}&{more}" for index in each for more in ("id=1", "row=1", f"where={quote(TEXT)}", f"q={quote(TEXT)}")
    ]
    queries = {
        "/": ["", "?image=" + "0" * 32, *search, f"?column={quote(NAME)}&op=%3D&value={quote(TEXT)}"],
        "/fleet": ["", f"?text={quote(TEXT)}&sort=age&start=0", f"?token={quote(TEXT)}"],
        "/map": ["", *(f"?{index}&q={quote(TEXT)}" for index in each)],
        "/map/points": [f"?{index}" for index in each],
        "/map/colours": [f"?{each[0]}&column={quote(NAME)}"],
        "/map/make": [f"?index={quote(TEXT)}"],  # no index: nothing is made
        "/ui/fleet/events": [f"?run={quote(TEXT)}"],
    }
    pages = 0
    for address in asked(server, values, queries):
        for headers in (
            {"accept": "text/html"},
            {"hx-request": "true", "hx-target": "results"},
            {"hx-request": "true", "hx-target": "row"},
        ):
            answer = client.get(address, headers=headers, follow_redirects=False)
            assert_secured(answer, address)
            assert "embq has a bug" not in answer.text, address
            assert re.match("(http://testserver)?/(?!/)", answer.headers.get("location", "/x")), address
            is_page = answer.headers.get("content-type", "").startswith("text/html") and "/map/app/" not in address
            assert ("x-embq-page" in answer.headers) == is_page, address
            if is_page:
                pages += 1
                assert_plain(server, answer.text, address, runs)
        posted = client.post(address, data={"x": "y"}, headers={"accept": "text/html", "origin": "http://testserver"})
        assert_secured(posted, address)
        if "x-embq-page" in posted.headers:
            assert_plain(server, posted.text, address, runs)
    assert pages > 100


def test_an_address_takes_values_of_its_types_only() -> None:
    hostile = (TEXT, NAME, "..", ".", "", "a/../b", "/a", "0" * 16 + "\n", "0" * 32 + "/", None, -1, 1.5, b"0")
    for name in Values.__struct_fields__:
        for value in hostile:
            if name in ("index", "modality") and value in (NAME, hostile[7]):
                continue  # a name of a folder, which is quoted
            with pytest.raises(MalformedError):
                url(f"/x/{{{name}}}", **{name: value})
    assert url("/x/{index}", index=NAME) == f"/x/{quote(NAME)}"
    assert url("/x", {"a": TEXT}) == f"/x?a={quote(TEXT, safe='').replace('%20', '+')}"


MADE = re.compile(r"url\('/|state\.(.+\.)?href }}$|query\.address\(")
GIVEN = {"{{ path }}", "{{ text }}", "{{ atlas }}", "{{ view.picture }}", "{{ notice.again }}"}
"""Of the bar, of a row behind the test `link`, and what Python makes with `url` or base64."""


def test_each_address_of_each_template_is_made_by_url() -> None:
    """Of the files, so that of a page which no test shows, too."""
    expressions = [
        (path.name, expression)
        for path in HERE.rglob("templates/**/*.html")
        for value in re.findall(rf'\s(?:{"|".join(ADDRESSES)})="((?:[^"{{]|{{[^"]*}}}}|{{%.*?%}})*)"', path.read_text())
        for expression in re.findall(r"{{.*?}}", value)
    ]
    assert len(expressions) > 25
    assert [one for one in expressions if one[1] not in GIVEN and not MADE.match(one[1][3:])] == []
    scripts = {path.name: path.read_text() for path in (HERE / "static").glob("*.js")}
    set_ = re.compile(r"(?:\.(?:src|href) = |fetch(?:ed)?\(|framed\(|location\.assign\(|ajax\(\"GET\", )([^;]*)")
    found = [(name, value) for name, text in scripts.items() for value in set_.findall(text)]
    by_script = (
        "address(",
        "path",
        '"/',
        "URL",
        "file",
        "charts.dataset.history",
        "thumbnails + Number(id)",
        "image.src",
        "location.href",
    )
    assert [one for one in found if not one[1].startswith(by_script)] == []
