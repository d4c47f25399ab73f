"""`embq serve --follow`: what is published below a folder is served, also what comes while the server runs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.core.rows.spec import RowSpec
from embq.retrieval.serving.index_discovery import followed_name, published_below
from tests.e2e.served import Server, served
from tests.support.outputs.build import build, write_jsonl, write_tar
from tests.support.outputs.index import build_index
from tests.support.waiting import wait_until

DIM = 16
UNIT = RowSpec(normalize=True)


def run_of_texts(root: Path, word: str, rows: int = 40) -> Path:
    """A run whose texts are `WORD 0`, `WORD 1` and so on, without an index."""
    inputs = root.parent / f"{root.name}-inputs"
    inputs.mkdir(parents=True)
    lines: list[object] = [{"id": f"k{i}", "text": f"{word} {i}"} for i in range(rows)]
    return build(root, [write_jsonl(inputs / "t.jsonl", lines)], model=f"stub:{DIM}", rows=UNIT)


def names(server: Server) -> list[tuple[str, str]]:
    return [(one["name"], one["modality"]) for one in server.ask("/health").json["indices"]]


def captions(server: Server, text: str, **more: object) -> list[str]:
    answer = server.ask("/search", {"text": text, "k": 1, **more})
    assert answer.status == 200, answer.data
    return [row["caption"] for row in answer.json["results"]]


@contextmanager
def asking(server: Server, text: str, index: str) -> Iterator[list[tuple[int, str]]]:
    """Two threads that search all the time: status, and the caption found or the code of the refusal."""
    answers: list[tuple[int, str]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answer = server.ask("/search", {"text": text, "index": index, "k": 1})
            said = answer.json["results"][0]["caption"] if answer.status == 200 else answer.json["code"]
            answers.append((answer.status, said))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_a_server_starts_with_nothing_and_takes_up_what_is_published(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with served(out, "--follow", "--memory", "mmap") as server:
        health = server.ask("/health")
        assert (health.status, health.json["status"], health.json["indices"]) == (200, "ok", [])
        assert server.ask("/indices-list").json == []
        for path, body in (("/search", {"text": "x"}), ("/knn-service", {"text": "x"}), ("/metadata", {"ids": [0]})):
            refused = server.ask(path, body)
            assert (refused.status, refused.json["code"]) == (503, "no_index")
            assert "embq index OUT" in refused.json["next"]
            assert refused.headers["retry-after"] == "10"
        assert run(["search", server.url, "x"]) == Exit.BAD_INPUT

        notes = run_of_texts(out / "notes", "note")
        build_index(notes, output="text")
        wait_until(lambda: names(server) == [("notes", "text")])
        assert captions(server, "note 7") == ["note 7"]

        team = run_of_texts(out / "team" / "letters", "letter")
        build_index(team, output="text")
        wait_until(lambda: names(server) == [("notes", "text"), ("team/letters", "text")])
        assert captions(server, "letter 3", index="team/letters") == ["letter 3"]
        assert 'embq_index_rows{index="team/letters",modality="text"} 40.0' in server.ask("/metrics").data.decode()

        build_index(notes, output="text")
        wait_until(lambda: server.ask("/health").json["indices"][0]["version"] == "v0002")

        with asking(server, "letter 3", "team/letters") as answers:
            shutil.rmtree(team)
            wait_until(lambda: names(server) == [("notes", "text")])
        assert set(answers) <= {(200, "letter 3"), (404, "no_such_index")}, "a search met an index that was half gone"
        assert "team/letters" not in server.ask("/metrics").data.decode()
        gone = server.ask("/search", {"text": "letter 3", "index": "team/letters"})
        assert (gone.status, gone.json["code"]) == (404, "no_such_index")
        assert captions(server, "note 7") == ["note 7"]
        for event in ("index_taken_up", "index_reloaded", "index_gone"):
            assert event in server.command.stderr
        assert "Traceback" not in server.command.stderr


def test_what_is_there_is_served_when_it_says_that_it_listens_and_what_is_damaged_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    good, bad = run_of_texts(out / "good", "good"), run_of_texts(out / "bad", "bad")
    build_index(good, output="text")
    index = build_index(bad, output="text")
    current = (index / "CURRENT").read_text()
    (index / "CURRENT").write_text("v0009\n")
    with served("--follow", out, "--no-model") as server:
        assert names(server) == [("good", "text")]
        (told,) = server.ask("/health").json["not_taken_up"]
        assert told["name"] == "bad"
        assert told["why"]
        assert server.command.stderr.count("index_not_taken_up") == 1
        (index / "CURRENT").write_text(current)
        wait_until(lambda: names(server) == [("good", "text"), ("bad", "text")])
        assert server.ask("/health").json["not_taken_up"] == []


@pytest.mark.slow
def test_images_and_texts_of_a_run_have_its_name_and_a_run_with_names_of_models_more(tmp_path: Path) -> None:
    members = []
    for i in range(20):
        members += [(f"s{i:02d}.jpg", f"image {i}".encode()), (f"s{i:02d}.txt", f"caption {i}".encode())]
    shard = write_tar(tmp_path / "a.tar", members)
    out = tmp_path / "out"
    pairs = build(out / "pairs", [shard], model=f"stub:{DIM}", modalities=("image", "text"), rows=UNIT)
    several = build(
        out / "several",
        [shard],
        model=(f"a=stub:{DIM}", "b=stub:8"),
        modalities=("text",),
        rows=UNIT,
    )
    for output in ("image", "text"):
        build_index(pairs, output=output)
    for output in ("a", "b"):
        build_index(several, output=output)
    with served(out, "--follow", "--no-model") as server:
        assert sorted(set(server.ask("/indices-list").json)) == ["pairs", "several/a", "several/b"]
        assert sorted(names(server))[:2] == [("pairs", "image"), ("pairs", "text")]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--follow", str(tmp_path / "missing"), "--port", "0"]) == Exit.BAD_INPUT
    said = capsys.readouterr().err
    assert "error[no_index]" in said
    assert "make it; it may be empty" in said
    assert run(["serve", "--follow", "--port", "0"]) == Exit.USAGE


# --- where indices are looked for ---


def published(index: Path) -> Path:
    index.mkdir(parents=True)
    (index / "CURRENT").write_text("v0001\n")
    return index


def test_indices_are_found_at_any_depth_and_not_in_folders_of_embq(tmp_path: Path) -> None:
    run_of = [tmp_path / "a", tmp_path / "team" / "b"]
    expected = [published(one / "index" / "text") for one in run_of]
    for one in run_of:
        (one / "run.json").write_text("{}")
        published(one / "parts" / "odd")  # of a run, only its folder of indices is looked at
    expected.append(published(tmp_path / "third"))
    for hidden in ("_work", ".trash"):
        published(tmp_path / hidden / "x")
    (tmp_path / "team" / "loop").symlink_to(tmp_path)
    (tmp_path / "z").symlink_to(tmp_path / "a")  # the same index twice is one
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert sorted(published_below(tmp_path)) == sorted(expected)
    assert list(published_below(expected[2])) == [expected[2]]
    assert list(published_below(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(
    ("index", "name"),
    [
        ("notes/index/text", "notes"),
        ("team/notes/index/image", "team/notes"),
        ("notes/index/clip_image", "notes/clip_image"),
        ("my-index", "my-index"),
        ("index/text", "out"),
        ("", "out"),
    ],
)
def test_an_index_is_called_by_the_path_of_its_run(index: str, name: str) -> None:
    assert followed_name(Path("/data/out") / index, Path("/data/out")) == name


def test_an_index_that_is_followed_itself_is_called_by_its_folder() -> None:
    assert followed_name(Path("/data/out/index/text"), Path("/data/out/index/text")) == "text"
