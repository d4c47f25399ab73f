"""What a map may make of a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embq.core import plugins
from embq.core.errors import SampleError, SourceError
from embq.core.units import Sample, Unit
from embq.sources.interface import SAMPLE_MAX_BYTES
from embq.sources.kinds import source_for
from embq.sources.maps import map_of, mapped

SAMPLE = Sample(ordinal=3, key="k", text="text", image=b"image", metadata='{"a":1}')


def refuse(_: Sample) -> Sample:
    raise SampleError("own_code", "not this one")


def test_a_map_may_change_text_and_image() -> None:
    found, error = mapped(lambda sample: replace(sample, text="other", image=None), SAMPLE)
    assert (found.text, found.image, found.key, error) == ("other", None, "k", None)


@pytest.mark.parametrize(
    ("function", "code", "told"),
    [
        (refuse, "own_code", "not this one"),
        (lambda _: 1 / 0, "map_failed", "the map raised ZeroDivisionError: division by zero"),
        (lambda _: None, "map_failed", "gave a NoneType in place of a Sample"),
        (lambda one: replace(one, key="x"), "map_failed", "changed the ordinal, key or metadata"),
        (lambda one: replace(one, metadata=None), "map_failed", "changed the ordinal, key or metadata"),
        (lambda one: replace(one, text=b"x"), "map_failed", "a text that is no str"),
        (lambda one: replace(one, text="x" * (SAMPLE_MAX_BYTES + 1)), "map_failed", "more than 32,000,000 bytes"),
    ],
)
def test_anything_else_is_a_failure_of_the_sample_alone(
    function: Callable[[Sample], Any], code: str, told: str
) -> None:
    found, error = mapped(function, SAMPLE)
    assert found is SAMPLE
    assert error is not None
    assert (error.code, told in error.message) == (code, True)


def test_a_plug_in_that_cannot_be_imported_fails_units_and_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[embq.maps]\nb = no_such_module:f\n[embq.sources]\nb = no_such_module:f\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EMBQ_PLUGINS", "broken")
    plugins.installed.cache_clear()
    try:
        with pytest.raises(
            SourceError, match="the plug-in b of broken 1 cannot be imported: ModuleNotFoundError"
        ) as map_:
            map_of(Unit(kind="lines", source="x", options=(("map", "b broken==1"),)))
        with pytest.raises(SourceError, match="cannot be imported") as kind:
            source_for("b")
    finally:
        plugins.installed.cache_clear()
    assert (map_.value.code, kind.value.code) == ("map_unavailable", "unknown_kind")


def test_a_unit_with_a_map_that_is_not_here_is_not_embedded_without_it() -> None:
    assert map_of(Unit(kind="lines", source="x")) is None
    unit = Unit(kind="lines", source="x", options=(("map", "os.system os==1"),))
    with pytest.raises(SourceError, match=r"go through the map os.system os==1, and on this worker it is not") as away:
        map_of(unit)
    assert away.value.code == "map_unavailable"
