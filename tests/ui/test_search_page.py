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
from e2e.served import Server, served

from embq.app.cli.entry_point import run
from tests.ui.browser import opened_page, serious_violations, until
from tests.ui.outputs import HOSTILE, write_photographs, write_texts

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHOTOGRAPHS, TEXTS = "photographs:image", "texts:text"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pages")
    write_photographs(folder)
    write_texts(folder)
    with served(folder, verb="ui", XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))) as one:
        yield one


def address(server: Server, **fields: object) -> str:
    return f"{server.url}/?{urlencode(fields)}"


def ids_of(page: Page) -> list[int]:
    """Ids of the results, in their order."""
    found = page.locator(".result .more dd:first-of-type").all_text_contents()
    return [int(one) for one in found]


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
        page.locator(".more summary").first.click()
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
        assert page.locator(".picture.none").count() == 0


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
        assert page.locator(".result >> nth=0 >> .more").get_attribute("open") is not None
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "q"
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("m")
        page.wait_for_url(lambda url: "id=5" not in url)


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
            page.locator(".more summary").first.click()
            assert serious_violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
