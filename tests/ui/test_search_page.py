"""The search page, over a real run of photographs in a tar and one of texts, over HTTP and in a browser."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from embq.app.cli.entry_point import run
from tests.e2e.served import Server, served
from tests.support.waiting import wait_until
from tests.ui.browser import opened_page, serious_violations, until
from tests.ui.outputs import HOSTILE, write_articles, write_photographs, write_texts, write_vectors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

PHOTOGRAPHS, TEXTS, VECTORS = "photographs:image", "texts:text", "vectors/img_emb:image"
ARTICLES = "articles:text"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pages")
    write_photographs(folder)
    write_texts(folder)
    write_vectors(folder)
    write_articles(folder)
    with served(folder, verb="ui", XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))) as one:
        yield one


def address(server: Server, **fields: object) -> str:
    return f"{server.url}/?{urlencode(fields)}"


def ids_of(page: Page) -> list[int]:
    """Ids of the results, in their order."""
    found = page.locator(".result .details").evaluate_all("links => links.map((link) => link.href)")
    return [int(parse_qs(urlsplit(one).query)["row"][0]) for one in found]


def searched(server: Server, **body: object) -> list[int]:
    """Ids of the results of `/search`."""
    answer = server.ask("/search", body)
    assert answer.status == 200, answer.data
    return [one["id"] for one in answer.json["results"]]


# --- over HTTP ---


def test_a_page_lets_no_inline_script_run_and_weighs_little(server: Server) -> None:
    answer = server.ask("/?" + urlencode({"index": TEXTS, "id": 3}))
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(rb"<script(?![^>]*src=)|\sstyle=|\son\w+=", answer.data)
    links = re.findall(rb'(?:src|href)="(/static/[^"]+)"', answer.data)
    assert len(answer.data) + sum(len(server.ask(one.decode()).data) for one in set(links)) <= 250_000


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"index": "nothing:text"}, 404, "there is no index"),
        ({"index": TEXTS, "id": "1e9"}, 400, "is no number"),
        ({"index": TEXTS, "id": "99999999"}, 404, "has no row"),
        ({"index": TEXTS, "row": "99999999"}, 404, "has no row"),
        ({"index": TEXTS, "row": "x"}, 400, "is no number"),
        ({"index": TEXTS, "q": "x" * 10_001}, 413, "10,000"),
        ({"index": TEXTS, "like": "1,x"}, 400, "is no number"),
        ({"index": TEXTS, "id": 1, "where": "colour = red"}, 400, "colour"),
        ({"index": PHOTOGRAPHS, "image": "0" * 32}, 404, "hold this image"),
    ],
)
def test_a_wrong_address_is_a_page_that_says_what_to_do(
    server: Server, fields: dict[str, object], status: int, said: str
) -> None:
    answer = server.ask("/?" + urlencode(fields))
    assert answer.status == status
    assert said in answer.data.decode()
    assert b'role="alert"' in answer.data


def test_the_details_of_a_row_are_a_part_of_the_page_with_links_of_the_web_alone(server: Server) -> None:
    def part(row: int) -> str:
        return server.ask("/?" + urlencode({"index": TEXTS, "row": row}), **{"HX-Target": "row"}).data.decode()

    shown = part(7)
    assert '<a href="https://example.org/?n=7&amp;a=b" target="_blank" rel="noopener noreferrer">' in shown
    assert all(f'<th scope="row">{name}</th>' in shown for name in ("key", "source", "text"))
    assert 'class="result"' not in shown
    for row in range(120, 120 + len(HOSTILE)):
        links = re.findall(r'href="([^"]*)"', part(row))
        assert len(links) == 4
        assert all(one.startswith("/?") for one in links), links
    assert "has no row" in part(10**9)


def test_the_chunks_of_a_document_are_one_result_with_its_best_chunk(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = server.ask("/search", {"id": 3, "index": "articles", "modality": "text", "k": 48}).json["results"]
    documents: dict[str, list[str]] = {}
    for one in answer:
        documents.setdefault(one["metadata"]["document"], []).append(one["key"])
    assert max(map(len, documents.values())) > 1
    assert [one["rank"] for one in answer] == list(range(1, 49)), "the JSON is as it was: all chunks, by their score"
    shown = server.ask("/?" + urlencode({"index": ARTICLES, "id": 3})).data.decode()
    assert re.findall(r'class="key">([^<]+)<', shown) == [key for keys in documents.values() for key in keys]
    counts = [int(one) for one in re.findall(r"<summary>(\d+) more chunks? of it", shown)]
    assert counts == [len(keys) - 1 for keys in documents.values() if len(keys) > 1]
    assert run(["search", server.url, "--id", "3", "-k", "48", "--index", "articles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [key for keys in documents.values() for key in keys]
    assert sum(line[15:17] != "  " for line in lines) == len(documents)
    assert "more chunk" not in server.ask("/?" + urlencode({"index": TEXTS, "id": 3})).data.decode()


def test_an_index_without_a_model_or_a_run_offers_neither_pictures_nor_images(server: Server) -> None:
    shown = server.ask("/?" + urlencode({"index": VECTORS})).data.decode()
    assert 'class="result"' in shown
    assert 'class="picture"' not in shown
    assert 'id="file"' not in shown
    assert 'placeholder="Choose a row below"' in shown


def test_a_page_of_another_origin_uploads_nothing(server: Server) -> None:
    answer = server.ask("/ui/image", data=b"x", Origin="http://evil.example")
    assert answer.status == 403
    assert server.ask("/ui/image", data=b"x" * (10 * 2**20 + 1)).status == 413


def test_files_outside_of_the_pages_are_not_served(server: Server) -> None:
    for path in ("/static/../rendering.py", "/static/%2e%2e/rendering.py", "/static/", "/static/vendor"):
        assert server.ask(path).status in (404, 405)


# --- in a browser ---


@pytest.mark.pages
def test_a_text_is_searched_and_the_address_holds_the_query(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(server.url)
        page.select_option("#index", TEXTS)
        page.wait_for_url("**index=texts%3Atext*")
        page.fill("#q", "an ordinary text, number 7")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=an+ordinary*")
        page.wait_for_selector(".score")
        found = ids_of(page)
        assert found == searched(server, text="an ordinary text, number 7", index="texts", k=48)
        page.reload()
        assert ids_of(page) == found
        assert page.input_value("#q") == "an ordinary text, number 7"


@pytest.mark.pages
def test_hostile_texts_are_shown_as_texts(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=TEXTS, id=0))
        page.goto(address(server, index=TEXTS, id=0, where="n = -1"))
        page.wait_for_selector(".result")
        shown = page.inner_text("#results")
        assert HOSTILE["script"] in shown
        assert HOSTILE["template"] in shown
        assert "\u202e" not in shown
        assert "\\u202e" in shown
        assert HOSTILE["emoji"] in shown
        assert page.evaluate("window.pwned") is None
        assert (
            page.evaluate("document.querySelectorAll('#results i, #results u, #results b, #results script').length")
            == 0
        )
        assert len(page.content()) < 250_000
        page.goto(address(server, index=TEXTS, q="<script>window.pwned=5</script>\"'><svg onload=window.pwned=6>"))
        page.wait_for_selector(".result")
        assert page.evaluate("window.pwned") is None


@pytest.mark.pages
def test_thumbnails_are_those_of_their_rows(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=PHOTOGRAPHS))
        until(page, "[...document.querySelectorAll('.picture img')].slice(0, 8).every((i) => i.naturalWidth > 1)")
        assert page.locator(".picture[data-state=gone], .picture[data-state=busy]").count() == 0


@pytest.mark.pages
def test_results_lead_to_more_like_them_examples_and_filters(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=PHOTOGRAPHS))
        page.locator(".result >> nth=5 >> text=More like this").click()
        page.wait_for_selector(".score")
        row = int(parse_qs(urlsplit(page.url).query)["id"][0])
        assert ids_of(page) == searched(server, id=row, index="photographs", modality="image", k=48)
        page.locator(".result >> nth=1 >> [aria-label^='More of row']").click()
        page.wait_for_url("**like=*")
        page.locator(".result >> nth=2 >> [aria-label^='Less of row']").click()
        page.wait_for_url("**unlike=*")
        fields = parse_qs(urlsplit(page.url).query)
        like, unlike = int(fields["like"][0]), int(fields["unlike"][0])
        assert not {row, like, unlike} & set(ids_of(page))
        page.click("text=Filter")
        page.select_option("#column", "year")
        page.select_option("#op", ">=")
        page.fill("#value", "2005")
        page.click("text=Add")
        page.wait_for_url("**where=*")
        body = {"id": row, "like": [like], "unlike": [unlike], "where": [["year", ">=", 2005]]}
        assert ids_of(page) == searched(server, **body, index="photographs", modality="image", k=48)
        page.click("[aria-label^='Remove the condition']")
        page.wait_for_url(lambda url: "where" not in url)


@pytest.mark.pages
def test_further_chunks_open_and_keys_pass_over_those_that_are_closed(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=ARTICLES, id=3))
        whole = page.locator("ol.list").first.locator("> .result")
        inner = whole.first.locator(".others .result")
        assert not inner.first.is_visible()
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.parentElement.children[1] === document.activeElement")
        whole.first.locator("summary").click()
        assert inner.first.is_visible()
        assert serious_violations(page) == []
        page.locator("body").press("j")
        inner.first.get_by_role("link", name="Details").click()
        page.locator("dialog h2").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1440


@pytest.mark.pages
def test_an_image_is_chosen_dropped_and_pasted(server: Server, browser: Browser, tmp_path: Path) -> None:
    from examples.demo.collect import photographs

    [(_, data)] = photographs(1, seed=3)
    file = tmp_path / "query.jpg"
    file.write_bytes(data)
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=PHOTOGRAPHS))
        page.set_input_files("#file", file)
        page.wait_for_url("**image=*")
        chosen, found = page.url, ids_of(page)
        assert found[0] == 0
        for name, carrier in (("drop", "dataTransfer"), ("paste", "clipboardData")):
            page.goto(address(server, index=PHOTOGRAPHS))
            page.evaluate(
                """async ([name, carrier, bytes]) => {
                    const data = new DataTransfer();
                    data.items.add(new File([new Uint8Array(bytes)], "query.jpg", { type: "image/jpeg" }));
                    const event = new Event(name, { bubbles: true, cancelable: true });
                    Object.defineProperty(event, carrier, { value: data });
                    document.getElementById("query").dispatchEvent(event);
                }""",
                [name, carrier, list(data)],
            )
            page.wait_for_url("**image=*")
            assert ids_of(page) == found
            assert parse_qs(urlsplit(page.url).query)["image"] == parse_qs(urlsplit(chosen).query)["image"]


@pytest.mark.pages
def test_the_keyboard_reaches_everything(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=TEXTS, id=5))
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog:modal table")
        page.keyboard.press("Escape")
        page.wait_for_url(lambda url: "row=" not in url)
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "q"
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("m")
        page.wait_for_url(lambda url: "id=5" not in url)


@pytest.mark.pages
@pytest.mark.parametrize("width", [390, 1440])
def test_the_details_of_a_row_have_an_address_and_leave_the_results_as_they_are(
    server: Server, browser: Browser, width: int
) -> None:
    with opened_page(browser, width=width) as (page, _):
        page.goto(address(server, index=PHOTOGRAPHS, id=3))
        results, rows = page.url, ids_of(page)
        before = page.locator("#results").bounding_box()

        def shows(row: int) -> None:
            page.wait_for_selector(f"dialog:modal h2:has-text('Row {row}')")
            assert parse_qs(urlsplit(page.url).query)["row"] == [str(row)]

        page.locator(".details").nth(1).click()
        shows(rows[1])
        until(page, "document.querySelector('dialog img').naturalWidth > 320")
        assert page.locator("#results").bounding_box() == before
        for key, at in (("ArrowRight", 2), ("j", 3), ("ArrowLeft", 2)):
            page.keyboard.press(key)
            shows(rows[at])
        page.click("#previous")
        shows(rows[1])
        page.click("#next")
        shows(rows[2])
        shared = page.url
        page.keyboard.press("Escape")
        page.wait_for_url(results)
        assert page.evaluate("document.activeElement === document.querySelectorAll('.details')[2]")
        page.go_forward()
        shows(rows[2])
        page.go_back()
        page.wait_for_selector("dialog", state="hidden")
        assert ids_of(page) == rows

        page.goto(shared)
        shows(rows[2])
        page.click("#close")
        page.wait_for_url(results)
        page.locator(".details").first.click()
        shows(rows[0])
        assert page.get_attribute("#previous", "aria-disabled") == "true"
        page.click("dialog >> text=More like this")
        page.wait_for_url(address(server, index=PHOTOGRAPHS, id=rows[0]))


@pytest.mark.pages
def test_a_thumbnail_that_fails_says_why_and_is_asked_for_again(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, faults):
        asked: list[str] = []
        answers = [503]

        def answer(route: Route) -> None:
            asked.append(route.request.url)
            route.fulfill(status=answers[-1], json={"message": "the shard is away"})

        def state(expected: str) -> bool:
            return bool(page.evaluate("document.querySelector('.picture').dataset.state") == expected)

        page.clock.install()
        page.route("**/thumb/**", answer)
        page.goto(address(server, index=PHOTOGRAPHS))
        wait_until(lambda: state("busy") or page.wait_for_timeout(20), 15)
        page.unroute("**/thumb/**")
        page.clock.fast_forward(2_000)
        wait_until(lambda: state("shown") or page.wait_for_timeout(20), 15)

        for status, times in ((404, 2), (503, 9)):  # by the page, at once to know why, and again where that may help
            page.goto("about:blank")
            asked.clear()
            answers.append(status)
            page.route("**/thumb/**", answer)
            page.goto(address(server, index=PHOTOGRAPHS))
            wait_until(lambda: state("gone") or page.clock.fast_forward(64_000) or page.wait_for_timeout(50), 15)
            assert page.locator(".picture").first.get_attribute("title") == "the shard is away"
            assert asked.count(asked[0]) == times
        faults.expect("Failed to load resource")


@pytest.mark.pages
def test_images_are_offered_where_they_can_be_searched_for(server: Server, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=PHOTOGRAPHS))
        page.set_input_files("#file", tmp_path / "notes.txt")
        page.wait_for_selector("[role=alert] >> text=notes.txt is no image")
        page.select_option("#index", TEXTS)
        page.wait_for_selector("#q[placeholder^='Type a few words, or drop']")
        page.select_option("#index", VECTORS)
        page.wait_for_selector("#q[placeholder='Choose a row below']")
        assert page.locator("#file").count() == 0


@pytest.mark.pages
def test_copies_for_other_tools_give_the_same_rows(
    server: Server, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=TEXTS, q='it\'s "number" 7; $(id)', where="n >= 100"))
        page.wait_for_selector(".result")
        found = ids_of(page)
        page.click("text=Copy as")
        page.locator("[data-copy]").first.click()
        page.wait_for_selector("text=Copied")
        copied = page.evaluate("navigator.clipboard.readText()")
        curl, python, cli = page.locator(".copies pre").all_text_contents()
    assert copied == curl
    answer = json.loads(subprocess.run(shlex.split(curl), check=True, capture_output=True, timeout=60).stdout)
    assert [one["id"] for one in answer["results"]] == found
    assert run([*shlex.split(cli)[1:], "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["results"]] == found
    scope: dict[str, object] = {}
    exec(python.replace("embq.search(", "found = embq.search(", 1), scope)
    assert [one.id for one in scope["found"]] == found  # type: ignore[attr-defined]


@pytest.mark.pages
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_accessible_and_fit_their_window(server: Server, browser: Browser, width: int, dark: bool) -> None:
    with opened_page(browser, width=width, dark=dark) as (page, _):
        for fields in ({"index": PHOTOGRAPHS}, {"index": TEXTS, "id": 1, "like": 2, "unlike": 3, "where": "n >= 0"}):
            page.goto(address(server, **fields))
            page.wait_for_selector(".result")
            for is_open in (False, True):
                if is_open:
                    page.locator(".details").first.click()
                    page.wait_for_selector("dialog:modal table")
                    assert page.locator("dialog").bounding_box()["width"] == (390 if width == 390 else 648)
                assert serious_violations(page) == []
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_cards_cut_no_word_and_scores_have_a_column_with_a_query_alone(server: Server, browser: Browser) -> None:
    inside = (
        "[...document.querySelectorAll('.facts, .facts *')].filter((one) => getComputedStyle(one).display !== 'inline')"
    )
    cut = f"{inside}.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    start = "getComputedStyle(document.querySelector('.list .facts')).gridTemplateColumns.split(' ').length"
    with opened_page(browser) as (page, _):
        page.goto(address(server, index=PHOTOGRAPHS, id=3))
        page.locator(".grid .result").first.wait_for()
        assert page.evaluate(cut) == 0
        tops = "(one) => [...one.querySelectorAll('.actions a')].map((link) => Math.round(link.offsetTop))"
        assert len(set(page.locator(".grid .result").first.evaluate(tops))) == 1
        page.goto(address(server, index=TEXTS))
        assert page.evaluate(start) == 2
        page.goto(address(server, index=TEXTS, id=3))
        assert page.evaluate(start) == 3
        assert page.evaluate(cut) == 0


def test_an_error_in_place_of_results_leaves_the_page_and_its_form(server: Server, browser: Browser) -> None:
    with opened_page(browser) as (page, faults):
        page.goto(address(server, index=TEXTS))
        page.route("**/?*q=*", lambda route: route.fulfill(status=500, content_type="text/html", body="<p>a bug</p>"))
        page.fill("#q", "text")
        page.keyboard.press("Enter")
        page.locator("#results").get_by_text("a bug").wait_for()
        page.unroute("**/?*q=*")
        page.keyboard.press("Enter")
        page.locator("#results .result").first.wait_for()
        faults.expect("500")


def test_a_server_that_is_gone_is_told_and_the_search_repeated_until_it_is_back(
    server: Server, browser: Browser
) -> None:
    with opened_page(browser) as (page, faults):
        page.goto(address(server, index=TEXTS))
        page.context.set_offline(True)
        page.fill("#q", "text")
        page.keyboard.press("Enter")
        notice = page.get_by_text("The server of this page does not answer")
        notice.wait_for()
        assert page.input_value("#q") == "text"
        page.context.set_offline(False)
        notice.wait_for(state="detached")
        page.locator("#results .result").first.wait_for()
        assert "q=text" in page.url
        for fault in ("ERR_INTERNET_DISCONNECTED", "htmx:sendError", "htmx:afterRequest"):
            faults.expect(fault)
