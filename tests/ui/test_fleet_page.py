"""The fleet page in a browser, beside real services: counters, a machine that dies, buttons, a retry with its count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from embq.core.storage.paths import place
from tests.e2e.served import Server, served
from tests.e2e.services import Services
from tests.e2e.session import closed, run_of
from tests.support.outputs.build import build, write_jsonl
from tests.support.waiting import wait_until
from tests.ui.browser import opened_page, serious_violations, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.pages


@contextmanager
def fleet(server: EmbeddedServer, folder: Path, workers: int = 2) -> Iterator[tuple[Services, Server]]:
    """Services, and `embq ui` with actions."""
    with ExitStack() as stack:
        services = Services(stack, server, workers=workers)
        arguments = (folder, "--no-model", "--allow-actions")
        yield services, stack.enter_context(served(*arguments, verb="ui", EMBQ_BROKER_URL=server.url))


def act(page: Page, server: Server) -> None:
    """Come with the token."""
    wait_until(lambda: "?token=" in server.command.stderr)
    page.goto(re.findall(r"http\S+token=\S+", server.command.stderr)[0])
    page.wait_for_url("**/fleet")


def rows_of(page: Page) -> int:
    return int(page.locator(".runs .rows").first.inner_text().split()[0].replace(",", ""))


def test_what_is_no_page_of_embq_is_never_inserted(tmp_path: Path, browser: Browser) -> None:
    with served(tmp_path, "--no-model", verb="ui") as server, opened_page(browser) as (page, faults):
        page.goto(f"{server.url}/fleet")
        for number, path in enumerate(("/static/icon.svg", "/indices-list", "/ui/image/x", "/thumb/x/image/0")):
            page.evaluate("path => htmx.ajax('GET', path, '#said')", path)
            until(page, "document.querySelector('#said .notice') !== null")
            assert page.locator("#said svg").count() == 0
            assert ("No page of embq" in page.locator("#said").inner_text()) == (number < 2)
            page.evaluate("document.getElementById('said').replaceChildren()")
        faults.expect("404")
        faults.expect("Response Status Error")


@pytest.mark.slow
def test_counters_move_buttons_act_and_a_machine_that_dies_turns_grey(
    own_server: EmbeddedServer, short_tmp: Path, browser: Browser
) -> None:
    root = short_tmp / "notes"
    with fleet(own_server, short_tmp) as (services, server), opened_page(browser) as (page, _):
        services.enqueue(root, 4_000)
        act(page, server)
        page.locator(".runs .state.s-running").wait_for(timeout=60_000)
        page.locator(".card.s-serving, .card.s-waiting").first.wait_for()
        wait_until(lambda: rows_of(page) > 0)
        before = rows_of(page)
        wait_until(lambda: rows_of(page) > before)
        assert serious_violations(page) == []

        page.get_by_role("button", name="Pause").click()
        page.locator("#said").get_by_text("is paused").wait_for()
        page.locator(".runs .state.s-paused").wait_for()
        assert services.status(root)["state"] == "paused"
        page.get_by_role("button", name="Resume").click()
        page.locator(".runs .state.s-running").wait_for(timeout=30_000)
        assert services.status(root)["state"] == "running"

        assert page.locator(".card.grey").count() == 0
        services.services["worker"].kill_all()
        page.locator(".card.grey").first.wait_for(timeout=30_000)
        assert page.locator(".card.grey").count() == services.workers


def test_the_page_of_a_run_shows_its_failures_and_a_retry_tells_its_count_first(
    own_server: EmbeddedServer, short_tmp: Path, browser: Browser
) -> None:
    root, source = short_tmp / "notes", short_tmp / "notes.jsonl"
    lines = [{"id": str(number), "text": f"text {number}" if number % 5 else ""} for number in range(15)]
    write_jsonl(source, lines)
    with fleet(own_server, short_tmp, workers=1) as (services, server), opened_page(browser) as (page, _):
        services.call("enqueue", source, "-o", root, "-m", "stub:4", "--unit-size", "5")
        services.until(lambda: closed(root))
        write_jsonl(source, [{**one, "text": one["text"] or "mended"} for one in lines])
        act(page, server)
        page.locator(".runs .name").click()
        page.wait_for_url(f"**/fleet/{run_of(root)}")
        page.locator(".group code").get_by_text("empty_text").wait_for()
        assert page.locator("svg.units path.failures").count() == 1
        page.locator("[data-chart=commits] canvas").wait_for()
        assert serious_violations(page) == []

        page.get_by_role("button", name="Retry…").click()
        page.locator("#said").get_by_text("3 failures would be done again").wait_for()
        assert load_run(place(str(root))).added == ()
        page.get_by_role("button", name="Retry 3").click()
        page.locator("#said").get_by_text("3 failures are done again").wait_for()
        page.get_by_text("None is committed.").wait_for(timeout=60_000)
        assert page.locator("svg.units path.failures").count() == 0
    info = load_run(place(str(root)))
    state = CommitLog(Layout(place(str(root)))).replay(info.units)
    assert (state.rows, state.failures) == (15, 0)


def test_runs_are_filtered_by_a_form_sorted_by_a_column_and_none_is_in_a_box_that_scrolls(
    tmp_path: Path, browser: Browser
) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    for name in ("c/out", "b/out", "a/out", "last"):
        build(tmp_path / name, [source])
    with served(tmp_path, "--no-model", verb="ui") as server, opened_page(browser) as (page, _):
        page.goto(f"{server.url}/fleet")
        names = page.locator(".runs .name b")
        until(page, "document.querySelectorAll('.runs .name').length === 4")
        boxes = "[...document.querySelectorAll('#live section')]"
        assert page.evaluate(f"{boxes}.every((one) => getComputedStyle(one).overflowY === 'visible')")
        page.get_by_role("link", name="Run", exact=True).click()
        page.wait_for_url("**/fleet?sort=name")
        assert names.all_inner_texts() == ["a/out", "b/out", "c/out", "last"]
        page.get_by_role("searchbox").fill("out")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=out**")
        assert names.all_inner_texts() == ["a/out", "b/out", "c/out"]
        page.wait_for_timeout(2_500)  # two samples: the stream has the same runs as the page
        assert names.all_inner_texts() == ["a/out", "b/out", "c/out"]
        assert serious_violations(page) == []
        page.get_by_label("State").select_option("paused")
        page.wait_for_url("**state=paused**")
        page.get_by_role("link", name="Show all").click()
        until(page, "document.querySelectorAll('.runs .name').length === 4")


def test_the_log_of_a_service_grows_and_stays_where_its_reader_is(tmp_path: Path, browser: Browser) -> None:
    root = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])])
    (root / "_logs").mkdir()
    with open(root / "_logs" / "worker.log", "w", buffering=1) as log:
        log.writelines(f"2026-01-01T00:00:00Z info worker line {n} <script>pwned = 1</script>\n" for n in range(99))
        log.write("2026-01-01T00:00:01Z warning worker slow\n")
        with served(tmp_path, "--no-model", verb="ui") as server, opened_page(browser, width=390) as (page, _):
            page.goto(f"{server.url}/fleet/{load_run(root).run}")
            box = page.locator("#log-worker")
            box.get_by_text("warning worker slow").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert serious_violations(page) == []
            page.evaluate("document.getElementById('log-worker').scrollTop = -400")
            log.write("2026-01-01T00:00:02Z error worker stopped\n")
            page.locator("#log-worker .error").wait_for()
            assert page.evaluate("document.getElementById('log-worker').scrollTop") == -400


@pytest.mark.parametrize("width", [1440, 390, 360])
def test_no_page_is_wider_than_the_window(
    own_server: EmbeddedServer, short_tmp: Path, browser: Browser, width: int
) -> None:
    with fleet(own_server, short_tmp, workers=1) as (services, server):
        services.enqueue(short_tmp / "a-rather-long-name-of-an-output-folder", 40)
        services.enqueue(short_tmp / "short", 4)
        with opened_page(browser, width=width, dark=width == 390) as (page, _):
            act(page, server)
            page.locator(".runs .name").nth(1).wait_for()
            page.locator(".card").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            inside = "[...document.querySelectorAll('.line *, .card *')].filter((one) => one instanceof HTMLElement)"
            hidden = f"{inside}.filter((one) => getComputedStyle(one).overflowX === 'hidden')"
            assert page.evaluate(f"{hidden}.filter((one) => one.scrollWidth > one.clientWidth + 1).length") == 0
            page.locator(".runs .name").first.click()
            page.locator("svg.units").wait_for()
            page.wait_for_load_state()  # elements are there before the style sheets are
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert serious_violations(page) == []


def test_a_run_that_is_over_has_no_empty_chart_and_its_times_have_one_form(tmp_path: Path, browser: Browser) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": str(number)} for number in range(40)])
    run = load_run(place(str(build(tmp_path / "out", [source], unit_samples=10)))).run
    form = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    with served(tmp_path, "--no-model", verb="ui") as server, opened_page(browser) as (page, _):
        page.goto(f"{server.url}/fleet/{run}")
        page.locator("[data-chart=commits] canvas").wait_for()
        assert page.locator(".charts figure:visible").count() == 1
        assert re.search(rf"planned\s*{form}, ", page.locator(".facts").inner_text())
        page.locator("[data-chart=commits] .u-over").hover()
        assert re.search(form, page.locator("[data-chart=commits] .u-legend").inner_text())
        assert page.locator(".spark").count() == 0
