"""Maps: functions of plug-ins that change samples between reading and embedding, `--map NAME`.

A unit carries the name, package and version of its map; the worker's operator enables the package with EMBQ_PLUGINS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from embq.core import plugins
from embq.core.errors import ConfigError, SampleError, SourceError, UsageError
from embq.core.plugins import Plugin
from embq.core.units import Sample, Unit
from embq.sources.interface import SAMPLE_MAX_BYTES

Map = Callable[[Sample], Sample]
"""Returns the sample with another text or image, and the same ordinal, key and metadata.

Called from several threads at once, it returns the same result each time. It raises `embq.core.errors.SampleError`
for a sample that is to be a failure.
"""

OPTION = "map"
"""Option of units with `Plugin` as text."""


def identity_of(name: str) -> str:
    """Name, package and version of an enabled map, as a run records them, "" for ""; UsageError if there is none."""
    if not name:
        return ""
    enabled = plugins.enabled(plugins.MAPS)
    if name not in enabled:
        names = ", ".join(enabled) or "none"
        raise UsageError(
            f"--map {name}: there is no such map",
            next_step=plugins.how_to_enable(plugins.MAPS, name) or f"maps that EMBQ_PLUGINS enables here: {names}",
        )
    return str(enabled[name])


def map_of(unit: Unit) -> Map | None:
    """The map of a unit's samples, None for none.

    Raises SourceError `map_unavailable` if it is not enabled here, of another version, or cannot be imported.
    """
    identity = dict(unit.options).get(OPTION, "")
    if not identity:
        return None
    try:
        plugin = plugins.enabled(plugins.MAPS).get(identity.partition(" ")[0])
        if plugin is not None and str(plugin) == identity:
            return _loaded(plugin)
    except ConfigError as error:
        raise SourceError(
            f"{unit.source}: {error.message}", code="map_unavailable", next_step=error.next_step
        ) from error
    held = "it is not enabled" if plugin is None else f"{plugin.package} {plugin.version} is installed"
    raise SourceError(
        f"{unit.source}: the run's samples go through the map {identity}, and on this worker {held}",
        code="map_unavailable",
        next_step="install that version on the worker and name the package in its EMBQ_PLUGINS; then embq retry",
    )


@cache
def _loaded(plugin: Plugin) -> Map:
    loaded: Map = plugin.load()
    return loaded


def mapped(function: Map, sample: Sample) -> tuple[Sample, SampleError | None]:
    """The sample after its map; the sample and why it has no embedding, if the map returns none."""
    if isinstance(sample.image, memoryview):
        sample = replace(sample, image=bytes(sample.image))
    try:
        result = function(sample)
    except SampleError as error:
        return sample, error
    except Exception as error:  # noqa: BLE001 - it is not our code
        return sample, SampleError("map_failed", f"the map raised {type(error).__name__}: {error}"[:1_000])
    if (why := _wrong(sample, result)) is not None:
        return sample, SampleError("map_failed", f"the map {why}")
    return result, None


def _wrong(sample: Sample, result: Sample) -> str | None:
    if not isinstance(result, Sample):
        return f"gave a {type(result).__name__} in place of a Sample"
    if (result.ordinal, result.key, result.metadata) != (sample.ordinal, sample.key, sample.metadata):
        return "changed the ordinal, key or metadata of the sample"
    if not isinstance(result.text, str | None) or not isinstance(result.image, bytes | None):
        return "gave a text that is no str, or an image that is not bytes"
    if len(result.text or "") > SAMPLE_MAX_BYTES or len(result.image or b"") > SAMPLE_MAX_BYTES:
        return f"gave a text or image of more than {SAMPLE_MAX_BYTES:,} bytes"
    return None
