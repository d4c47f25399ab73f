"""Plug-ins: model families, kinds of input and maps that other installed packages have, found by their entry points.

EMBQ_PLUGINS names the packages whose entry points are used. That a package is installed, or that a queue names one of
its entry points, runs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from embq.core.errors import ConfigError
from embq.core.settings import plugin_packages

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

MODELS, SOURCES, MAPS = "embq.models", "embq.sources", "embq.maps"
"""Groups of entry points."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point.

    Attributes:
        name: of the entry point.
        package: name of its distribution.
        version: of the distribution.
    """

    name: str
    package: str
    version: str
    entry: EntryPoint

    def load(self) -> Any:
        """The object of the entry point; ConfigError if it cannot be imported."""
        try:
            return self.entry.load()
        except Exception as error:
            raise ConfigError(
                f"the plug-in {self.name} of {self.package} {self.version} cannot be imported: "
                f"{type(error).__name__}: {error}",
                next_step=f"repair {self.package}, or leave it out of EMBQ_PLUGINS",
            ) from error

    def __str__(self) -> str:
        return f"{self.name} {self.package}=={self.version}"


def enabled(group: str) -> dict[str, Plugin]:
    """The plug-ins of a group by name; {} if EMBQ_PLUGINS names no package.

    Raises ConfigError if two packages have one of the same name.
    """
    packages = {_normalized(name) for name in plugin_packages()}
    by_name: dict[str, Plugin] = {}
    for plugin in installed(group) if packages else ():
        if _normalized(plugin.package) in packages:
            if plugin.name in by_name:
                raise ConfigError(
                    f"{plugin.package} and {by_name[plugin.name].package} both have the plug-in {plugin.name}",
                    next_step="leave one of them out of EMBQ_PLUGINS",
                )
            by_name[plugin.name] = plugin
    return by_name


def missing_packages() -> list[str]:
    """The names in EMBQ_PLUGINS of packages that are not installed here, or have no plug-in."""
    if not (named := plugin_packages()):
        return []
    having = {_normalized(plugin.package) for group in (MODELS, SOURCES, MAPS) for plugin in installed(group)}
    return sorted(name for name in named if _normalized(name) not in having)


@cache
def installed(group: str) -> tuple[Plugin, ...]:
    """The plug-ins of all installed packages, enabled or not."""
    from importlib.metadata import entry_points  # 20 ms, which most processes do without

    return tuple(
        Plugin(entry.name, entry.dist.name, entry.dist.version, entry)
        for entry in entry_points(group=group)
        if entry.dist is not None
    )


def how_to_enable(group: str, name: str) -> str:
    """The next step if an installed package has a plug-in that EMBQ_PLUGINS does not name; "" for no such one."""
    for plugin in installed(group):
        if plugin.name == name:
            return f"the package {plugin.package} has it: EMBQ_PLUGINS={plugin.package} enables it, also on workers"
    return ""


def _normalized(package: str) -> str:
    """The name of a distribution as packaging compares it."""
    return re.sub(r"[-_.]+", "-", package).lower()
