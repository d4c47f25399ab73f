"""The map of an index: coordinates, clusters and labels, the page, and selections as ids."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.app.cli.id_file import read_ids
from embq.core.errors import EmbqError, Exit, InputError
from embq.core.rows.spec import RowSpec
from embq.index.atlas.map_file import MapOptions, make_map, map_path, read_info
from embq.index.atlas.projection import plane
from embq.index.index_files.files import index_lock
from embq.index.index_files.version import read_current
from embq.retrieval.ui.map.embedding_atlas import address
from tests.e2e.served import Server, served
from tests.support.outputs.build import build, write_jsonl
from tests.support.outputs.index import build_index
from tests.support.waiting import wait_until
from tests.ui.browser import opened_page, serious_violations, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WORDS = {"animals": "horse stable saddle", "stars": "galaxy nebula orbit", "kitchen": "flour oven recipe"}
"""Topic -> words of its texts; the stub has no topics, so texts of one topic are equal but for their key."""

EACH = 40


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three topics, with its index."""
    folder = tmp_path_factory.mktemp("map")
    lines: list[object] = [
        {"id": f"{topic}-{i}", "text": words, "topic": topic} for topic, words in WORDS.items() for i in range(EACH)
    ]
    out = build(
        folder / "topics", [write_jsonl(folder / "t.jsonl", lines)], model="stub:16", rows=RowSpec(normalize=True)
    )
    build_index(out, output="text")
    return out


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    assert run(["atlas", str(root), "--no-serve"]) == Exit.DONE
    with served(root.parent, "--no-model", verb="ui") as one:
        yield one


def test_rows_of_one_topic_lie_together_under_their_words(root: Path) -> None:
    index = root / "index" / "text"
    info, _ = make_map(index, MapOptions(method="pca"))
    table = pq.read_table(map_path(index))
    assert info.rows == table.num_rows == 3 * EACH
    assert table["id"].to_pylist() == list(range(3 * EACH))
    at = np.column_stack([table["x"].to_numpy(), table["y"].to_numpy()])
    topics = np.array([key.partition("-")[0] for key in table["key"].to_pylist()])
    centres = {topic: at[topics == topic].mean(0) for topic in WORDS}
    spread = max(np.abs(at[topics == topic] - centres[topic]).max() for topic in WORDS)
    apart = min(np.linalg.norm(centres[a] - centres[b]) for a in WORDS for b in WORDS if a != b)
    assert apart > 10 * spread
    labels = {(topic, label) for topic, label in zip(topics, table["label"].to_pylist(), strict=True)}
    assert all(set(label.split(", ")) <= set(WORDS[topic].split()) and label for topic, label in labels)


@pytest.mark.parametrize("shape", ["ring", "islands"])
def test_the_place_of_a_label_is_among_the_points_of_its_cluster(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    turns = np.linspace(0.0, 2 * np.pi, 3 * EACH)
    ring = 10 * np.column_stack([np.cos(turns), np.sin(turns)])
    drawn = (ring if shape == "ring" else np.where(ring > 0, 10.0, -10.0) + 0.01 * ring).astype(np.float32)
    monkeypatch.setattr("embq.index.atlas.map_file.plane", lambda *_: drawn)
    index = build_index(root, output="text", to=tmp_path / "index")
    info, _ = make_map(index, MapOptions())
    cluster = pq.read_table(map_path(index))["cluster"].to_numpy()
    for number, one in enumerate(info.clusters):
        assert (drawn[cluster == number] == np.float32([one.x, one.y])).all(axis=1).any()


def test_a_map_says_what_it_is_of_and_is_made_anew_only_for_another_version(root: Path) -> None:
    index = root / "index" / "text"
    make_map(index, MapOptions())
    version = read_current(index)
    info = read_info(map_path(index))
    assert (info.version, info.fingerprint) == (version.name, version.collection.fingerprint)
    assert make_map(index, MapOptions())[1] is False
    assert make_map(index, MapOptions(sample=50))[0].rows == 50
    assert make_map(index, MapOptions())[1] is True


def test_a_damaged_map_is_named(root: Path, tmp_path: Path) -> None:
    make_map(root / "index" / "text", MapOptions())
    path = tmp_path / "map.parquet"
    for content in (b"", b"PAR1" * 4, map_path(root / "index" / "text").read_bytes()[:-40]):
        path.write_bytes(content)
        with pytest.raises(EmbqError) as refused:
            read_info(path)
        assert refused.value.code == "bad_map"
        assert str(tmp_path) in refused.value.next_step
    with pytest.raises(InputError) as missing:
        read_info(tmp_path / "none" / "map.parquet")
    assert missing.value.next_step == f"embq atlas {tmp_path / 'none'}"


def test_a_selection_is_exported_and_deleted_by_its_ids(root: Path, tmp_path: Path, server: Server) -> None:
    shape = {"polygon": [[-1e6, -1e6], [1e6, -1e6], [1e6, 1e6], [-1e6, 1e6]]}
    answer = server.ask("/map/select?index=topics:text", shape)
    assert answer.status == 200
    assert [int(line) for line in answer.data.split()] == list(range(3 * EACH))
    ids = tmp_path / "ids.txt"
    ids.write_text("3\n77\n5\n")
    assert run(["export", str(root), str(tmp_path / "some"), "--output-format", "parquet", "--ids", str(ids)]) == 0
    exported = [
        row for file in sorted((tmp_path / "some").rglob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]
    assert sorted(row["key"] for row in exported) == ["animals-3", "animals-5", "stars-37"]
    copy = build_index(root, output="text", to=tmp_path / "copy")
    assert run(["index", "delete", str(copy), "--ids", str(ids)]) == Exit.DONE
    found = embq.search(copy, id=4, k=3 * EACH)
    assert not {3, 5, 77} & {one.id for one in found}
    assert len(found) == 3 * EACH - 4


@pytest.mark.parametrize("text", ["x\n", "1\n-2\n", "99999999\n", "1.5\n"])
def test_a_file_that_holds_no_ids_is_refused(
    root: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text(text)
    assert run(["export", str(root), str(tmp_path / "out"), "--output-format", "parquet", "--ids", str(ids)]) != 0
    assert capsys.readouterr().err.startswith("error[")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", [b"[]", b'{"polygon": [["a", 1]]}', b"x" * 100])
def test_a_selection_that_is_no_shape_is_refused(server: Server, shape: bytes) -> None:
    answer = server.ask("/map/select?index=topics:text", data=shape)
    assert answer.status == 400
    assert set(json.loads(answer.data)) == {"code", "message", "next"}


@pytest.mark.pages
def test_points_are_drawn_and_selected_in_a_browser(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(f"{server.url}/map?index=topics:text")
        until(page, "document.querySelectorAll('#legend li').length >= 3")
        colours = """(() => {
            const canvas = document.getElementById("points");
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size;
        })()"""
        until(page, f"{colours} > 3")
        page.focus("#points")
        page.keyboard.press("0")
        page.keyboard.press("Enter")
        page.wait_for_selector("#chosen:not(.gone)")
        page.click("#copy")
        until(page, "navigator.clipboard.readText().then((text) => text.includes('7'))")
        ids = [int(line) for line in page.evaluate("navigator.clipboard.readText()").split()]
        assert ids == list(range(3 * EACH))
        page.select_option("#column", "topic")
        page.get_by_role("button", name="stars 40").click()
        until(page, "document.getElementById('count').textContent === '40 rows selected'")
        page.click("#lasso")
        box = page.locator("#points").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 2, box["y"] + 2)
        page.mouse.down()
        for right, bottom in ((1, 0), (1, 1), (0, 1)):
            page.mouse.move(box["x"] + 2 + right * (box["width"] - 4), box["y"] + 2 + bottom * (box["height"] - 4))
        page.mouse.up()
        until(page, "document.getElementById('count').textContent === '120 rows selected'")
        assert serious_violations(page) == []


RECORDER = """(() => {
    const pen = CanvasRenderingContext2D.prototype, { clearRect, fillText, arc } = pen;
    pen.clearRect = function (...of) { window.drawn = { texts: [], arcs: [] }; clearRect.apply(this, of); };
    pen.fillText = function (text, x, y) {
        window.drawn.texts.push([text, x, y, this.measureText(text).width / 2]);
        fillText.call(this, text, x, y);
    };
    pen.arc = function (x, y, ...of) { window.drawn.arcs.push([x, y]); arc.call(this, x, y, ...of); };
})()"""
"""Notes the texts and the discs that a page draws on its canvas, in its own pixels."""


@pytest.mark.pages
@pytest.mark.parametrize("width", [390, 1440])
def test_labels_lie_whole_beside_their_points_and_of_two_that_would_overlap_the_larger_clusters_is_drawn(
    server: Server, browser: Browser, root: Path, width: int
) -> None:
    make_map(root / "index" / "text", MapOptions())
    labels = [one.label for one in read_info(map_path(root / "index" / "text")).clusters]
    with opened_page(browser, width=width) as (page, _):
        page.add_init_script(RECORDER)
        page.goto(f"{server.url}/map?index=topics:text")
        page.wait_for_selector("#map[data-ready]")
        until(page, "window.drawn.arcs.length > 0")
        zooms = (None, "#in", "#in", "#all")
        for button in zooms:
            if button:
                page.click(button)
                page.wait_for_timeout(200)
            box = page.locator("#points").bounding_box()
            assert box is not None
            drawn = page.evaluate("window.drawn")
            assert drawn["texts"] or button
            for text, x, y, half in drawn["texts"]:
                assert x - half >= 0
                assert x + half <= box["width"]
                assert min(np.hypot(max(0, abs(a - x) - half), b - y) for a, b in drawn["arcs"]) < 2
                for other, left, top, its in drawn["texts"]:
                    assert other == text or abs(left - x) >= half + its or abs(top - y) >= 14
        assert [text for text, *_ in drawn["texts"]] == [
            one for one in labels if one in {t for t, *_ in drawn["texts"]}
        ]
        assert drawn["texts"][0][0] == labels[0]


@pytest.mark.pages
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1440, True)])
def test_hits_are_listed_beside_the_map_and_a_click_centres_the_point(
    root: Path, browser: Browser, width: int, dark: bool
) -> None:
    make_map(root / "index" / "text", MapOptions())
    with served(root, verb="ui") as server, opened_page(browser, width=width, dark=dark) as (page, _):
        page.add_init_script(RECORDER)
        wait_until(lambda: server.ask("/search", {"text": WORDS["stars"], "modality": "text"}).status == 200)
        page.goto(f"{server.url}/map?index=topics:text")
        page.wait_for_selector("#map[data-ready]")
        page.fill("#q", WORDS["stars"])
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('#examples button').length === 10")
        assert page.text_content("#count") == "10 hits"
        for hit in page.locator("#examples button").all():
            assert (hit.text_content() or "").startswith("1.000" + WORDS["stars"] + "stars-")
        chosen = page.locator("#examples button").nth(7)
        key = (chosen.text_content() or "").rpartition(WORDS["stars"])[2]
        chosen.click()
        page.wait_for_selector("#tip:not(.gone)")
        assert key in (page.text_content("#tip") or "")
        box = page.locator("#points").bounding_box()
        assert box is not None
        middle = [box["width"] / 2, box["height"] / 2]
        until(
            page,
            f"Math.hypot(window.drawn.arcs.at(-1)[0] - {middle[0]}, window.drawn.arcs.at(-1)[1] - {middle[1]}) < 1",
        )
        assert serious_violations(page) == []


def test_a_missing_map_names_its_command_and_is_made_by_viewers_who_may_act_alone(root: Path, tmp_path: Path) -> None:
    index = build_index(root, output="text", to=tmp_path / "an index")
    with served(index, "--no-model", verb="ui") as server:
        shown = html.unescape(server.ask("/map").data.decode())
        assert f"<code>embq atlas '{index}'</code>" in shown
        assert "Make the map" not in shown
        assert server.ask("/map/make", data=b"x=1", Origin=server.url).status == 403
    assert not map_path(index).exists()


@pytest.mark.pages
def test_a_button_makes_the_map_where_actions_are_allowed(root: Path, tmp_path: Path, browser: Browser) -> None:
    index = build_index(root, output="text", to=tmp_path / "index")
    with served(index, "--no-model", "--allow-actions", verb="ui") as server, opened_page(browser) as (page, _):
        wait_until(lambda: "?token=" in server.command.stderr)
        page.goto(server.command.stderr.split("open ")[1].split()[0])
        page.goto(f"{server.url}/map")
        with index_lock(index):
            page.click("text=Make the map")
            page.get_by_text("The map was not made").wait_for()
            assert "error[" in (page.text_content(".notice") or "")
        page.goto(f"{server.url}/map")
        page.click("text=Make the map")
        page.get_by_text("The map is being made").wait_for()
        page.wait_for_selector("#map[data-ready]", timeout=60_000)
    assert read_info(map_path(index)).rows == 3 * EACH


def test_umap_keeps_topics_apart_and_is_the_same_for_a_seed(root: Path, tmp_path: Path) -> None:
    index = build_index(root, output="text", to=tmp_path / "index")
    tables = []
    for sample in (3 * EACH, 3 * EACH + 1):
        info, made = make_map(index, MapOptions(method="umap", sample=sample))
        assert made
        assert info.method == "umap"
        tables.append(pq.read_table(map_path(index)))
    assert tables[0].equals(tables[1])
    at = np.column_stack([tables[0]["x"].to_numpy(), tables[0]["y"].to_numpy()])
    topics = np.array([key.partition("-")[0] for key in tables[0]["key"].to_pylist()])
    distances = np.linalg.norm(at[:, None] - at[None], axis=2) + np.diag(np.full(len(at), np.inf))
    assert (topics[distances.argmin(axis=1)] == topics).mean() > 0.95


def test_neighbours_stay_neighbours_also_where_landmarks_are_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trustworthiness at 15 neighbours (Venna and Kaski, 2001) of 30 clusters in 20 dimensions."""
    generator = np.random.default_rng(0)
    middles = generator.normal(size=(30, 20))
    points = np.repeat(middles, 20, axis=0) + generator.normal(0.0, 0.3, (600, 20))
    points -= points.mean(axis=0)
    points = np.ascontiguousarray(points @ np.linalg.svd(points)[2].T, np.float32)
    at_best = trustworthiness(points, plane(points, "pca", 1)) + 0.1
    assert trustworthiness(points, plane(points, "umap", 1)) > at_best
    monkeypatch.setattr("embq.index.atlas.layout.LANDMARKS", 300)
    for exactly in (600, 500):
        monkeypatch.setattr("embq.index.atlas.layout.SEARCHED_EXACTLY", exactly)
        assert trustworthiness(points, plane(points, "umap", 1)) > at_best


@pytest.mark.parametrize("n", [1, 2, 4, 17, 300])
def test_equal_points_and_few_have_places(n: int) -> None:
    places = plane(np.zeros((n, 5), np.float32), "umap", 1)
    assert places.shape == (n, 2)
    assert np.isfinite(places).all()


def trustworthiness(points: np.ndarray, places: np.ndarray, k: int = 15) -> float:
    n = len(points)
    far, near = (np.linalg.norm(one[:, None] - one[None], axis=2) for one in (points, places))
    np.fill_diagonal(far, np.inf)
    np.fill_diagonal(near, np.inf)
    ranks = far.argsort(axis=1).argsort(axis=1)
    strange = np.maximum(np.take_along_axis(ranks, near.argpartition(k, axis=1)[:, :k], axis=1) + 1 - k, 0).sum()
    return float(1 - 2 * strange / (n * k * (2 * n - 3 * k - 1)))


# --- Embedding Atlas ---

needs_atlas = pytest.mark.skipif(
    find_spec("embedding_atlas") is None, reason="embedding-atlas is not installed: pip install 'embq[atlas]'"
)


@needs_atlas
def test_embedding_atlas_gets_the_file_and_the_server_answers_no_query(server: Server, root: Path) -> None:
    folder = address("topics", "text")
    assert f'href="{folder}"' in server.ask("/map?index=topics:text").data.decode()
    page = server.ask(folder)
    assert page.status == 200
    assert b"Embedding Atlas" in page.data
    policy = page.headers["content-security-policy"]
    assert "http" not in policy
    assert "'unsafe-eval'" not in policy
    assert server.ask(folder + "data/metadata.json").json["database"] == {"type": "wasm", "load": True}
    assert server.ask(folder + "data/dataset.parquet").data == map_path(root / "index" / "text").read_bytes()
    for path in ("data/query", "data/selection"):
        assert server.ask(folder + path, {"type": "json", "sql": "SELECT 1"}).status in (404, 405)
    for path in ("%2e%2e/%2e%2e/server.py", "..%2f__init__.py", "data/cache/../../../../etc/passwd"):
        assert b"import" not in server.ask(folder + path).data
    assert server.ask("/map/app/nothing!/data/metadata.json").status == 404


@needs_atlas
@pytest.mark.pages
def test_embedding_atlas_runs_without_a_request_elsewhere(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, faults):
        page.goto(server.url + address("topics", "text"))
        page.get_by_text(f"{3 * EACH} points").first.wait_for(timeout=60_000)
        page.get_by_text("horse", exact=False).first.wait_for()
        # Headless browsers have no WebGPU, which only the scatter plot needs; and it has no icon.
        faults.errors = [one for one in faults.errors if "WebGPU" not in one and "404" not in one]


def test_ids_are_read_from_tables_that_hold_texts_too(root: Path, tmp_path: Path) -> None:
    csv = tmp_path / "selection.csv"  # as Embedding Atlas writes it
    csv.write_text('id,x,caption\n7,0.5,"two\nlines, ""quoted"""\n3,0.25,\n')
    assert read_ids(csv).tolist() == [3, 7]
    make_map(root / "index" / "text", MapOptions())
    assert read_ids(map_path(root / "index" / "text")).tolist() == list(range(3 * EACH))
