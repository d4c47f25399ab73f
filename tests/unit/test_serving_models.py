"""Models that are loaded while the server answers already, and versions that are in use when a new one comes."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest

from embq.core.errors import InputError, ModelError
from embq.retrieval.serving import query_models as models_file
from embq.retrieval.serving.http_errors import HttpError, status_of
from embq.retrieval.serving.query_models import QueryModels
from embq.retrieval.serving.served_index import Recipe, ServedIndex, VersionInfo

VECTOR = np.ones(3, np.float32)


class Lengths:
    """Gives each text its length."""

    def text(self, text: str) -> np.ndarray:
        return VECTOR * len(text)

    def image(self, data: bytes) -> np.ndarray:
        return VECTOR * len(data)


def version(name: str = "v0001", key: str = "a") -> VersionInfo:
    recipe = Recipe(model={}, rows={}, key=key)
    return VersionInfo(name=name, rows=3, ids=3, dim=3, cosine=False, model=key, fingerprint=None, recipe=recipe)


def embedded(models: QueryModels, of: VersionInfo, text: str) -> np.ndarray:
    return anyio.run(partial(models.embed, of, lambda model: model.text(text)))


def test_a_query_waits_for_its_model() -> None:
    go, told = threading.Event(), []

    def load(_: VersionInfo) -> Lengths:
        assert go.wait(60)
        return Lengths()

    models = QueryModels(load, told.append)
    models.want(version())
    assert models.state(version()) == "loading"
    threading.Timer(0.05, go.set).start()
    assert embedded(models, version(), "four").tolist() == [4, 4, 4]
    assert models.state(version()) == "ready"
    assert told == ["a"]
    models.close()


def test_a_query_that_has_waited_long_enough_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_file, "WAIT_S", 0.05)
    go = threading.Event()

    def load(_: VersionInfo) -> Lengths:
        assert go.wait(60)
        return Lengths()

    models = QueryModels(load, lambda _: None)
    with pytest.raises(HttpError) as refused:
        embedded(models, version(), "x")
    assert (refused.value.code, refused.value.status) == ("model_loading", 503)
    assert refused.value.retry_after_s > 0
    go.set()
    monkeypatch.setattr(models_file, "WAIT_S", 60)
    assert embedded(models, version(), "x").tolist() == [1, 1, 1]
    models.close()


def test_versions_with_one_recipe_have_one_model() -> None:
    loaded: list[str] = []

    def load(of: VersionInfo) -> Lengths:
        loaded.append(of.name)
        return Lengths()

    models = QueryModels(load, lambda _: None)
    for of in (version("v0001"), version("v0002"), version("v0003", key="b")):
        embedded(models, of, "x")
    assert loaded == ["v0001", "v0003"]
    models.close()


def test_why_a_model_cannot_be_loaded_is_said_to_every_query() -> None:
    def load(_: VersionInfo) -> Lengths:
        raise ModelError("there are no weights", next_step="fetch them")

    models = QueryModels(load, lambda _: None)
    for _ in range(2):
        with pytest.raises(ModelError, match="there are no weights") as refused:
            embedded(models, version(), "x")
        assert status_of(refused.value) == 503
    assert models.state(version()) == "failed"
    models.close()


# --- versions ---


class Closable:
    """An index of which it is known whether it is open."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def served(folder: Path, opened: dict[str, Closable]) -> ServedIndex:
    def opener(path: Path) -> tuple[Closable, VersionInfo]:
        name = (path / "CURRENT").read_text()
        if name == "damaged":
            raise InputError("it is damaged")
        return opened.setdefault(name, Closable()), version(name)

    (folder / "CURRENT").write_text("one")
    return ServedIndex(name="x", modality="text", path=folder, opener=opener, count_rows=lambda _: None)  # type: ignore[arg-type]


def publish(folder: Path, name: str) -> None:
    """Publish a version as embq does, by a rename."""
    (folder / "new").write_text(name)
    (folder / "new").replace(folder / "CURRENT")


def test_an_old_version_stays_open_for_those_who_use_it(tmp_path: Path) -> None:
    opened: dict[str, Closable] = {}
    index = served(tmp_path, opened)
    assert not index.refresh()
    with index.use() as first, index.use() as second:
        publish(tmp_path, "two")
        assert index.refresh()
        with index.use() as third:
            assert (first.info.name, second.info.name, third.info.name) == ("one", "one", "two")
        assert not opened["one"].closed
    assert opened["one"].closed
    assert not opened["two"].closed


def test_a_version_that_nobody_uses_is_closed_at_once(tmp_path: Path) -> None:
    opened: dict[str, Closable] = {}
    index = served(tmp_path, opened)
    publish(tmp_path, "two")
    assert index.refresh()
    assert opened["one"].closed
    index.close()
    assert opened["two"].closed


def test_a_version_that_cannot_be_opened_leaves_the_old_one(tmp_path: Path) -> None:
    opened: dict[str, Closable] = {}
    index = served(tmp_path, opened)
    publish(tmp_path, "damaged")
    for _ in range(2):
        with pytest.raises(InputError):
            index.refresh()
    assert index.failed == "it is damaged"
    assert index.version.name == "one"
    (tmp_path / "CURRENT").unlink()
    assert not index.refresh()
    publish(tmp_path, "two")
    assert index.refresh()
    assert (index.version.name, index.failed) == ("two", "")


def test_an_index_that_was_built_anew_is_opened_again_though_its_version_has_the_same_name(tmp_path: Path) -> None:
    index = served(tmp_path, {})
    publish(tmp_path, "one")
    assert index.refresh()
