"""Ways to compute that the next process of a device leaves out, because earlier processes died with them.

`worker.embedders.device.optional_paths` has the ways of a process. Its allocator counts as one of them: expandable
segments fail at the first allocation where the driver has no virtual memory (some vGPUs, Jetson).
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from core.errors import Exit

EXPANDABLE = "expandable_segments"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""torch from 2.6 to 2.15 reads this name, and where it is set not the new one, PYTORCH_ALLOC_CONF, which 2.9 ignores
for expandable segments. 2.9 to 2.11 warn once that it is deprecated; later ones do not."""
ALLOCATORS = {ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Who sets one of them has the last word."""
NOT_EXPANDABLE = (Path("/dev/dxg"), Path("/dev/kfd"))
"""WSL2, where drivers before R615 fail at the first allocation, and AMD GPUs, for which torch has none."""


FAULTS = {Exit.DEVICE, -signal.SIGABRT}
"""Exit statuses with which a process ends whose device is broken: torch may abort where it frees what was on it."""


class PathMemory:
    """Of one device.

    Attributes:
        without: names of the ways that the next process leaves out.
    """

    def __init__(self) -> None:
        self.without: frozenset[str] = frozenset()
        self._allocator: frozenset[str] = frozenset()
        self._used: frozenset[str] = frozenset()

    def begin(self, device: str, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that starts now.

        With expandable segments, memory that passes of one size have freed serves those of another; each flat batch has
        another size.
        """
        is_chosen = bool(ALLOCATORS & environment.keys())
        has_them = device.startswith("cuda") and not any(path.exists() for path in NOT_EXPANDABLE)
        self._used = self._allocator = frozenset()
        if is_chosen or not has_them or EXPANDABLE in self.without:
            return dict(environment)
        self._used = self._allocator = frozenset({EXPANDABLE})
        return {**environment, ALLOCATOR: f"{EXPANDABLE}:True"}

    def told(self, names: Collection[str]) -> None:
        """Take note of the ways that the process has on trial or in use."""
        self._used = self._allocator | frozenset(names)

    def ended(self, status: int) -> None:
        """Take note of how the process ended.

        A process that died without any way left to blame shows that those that were left out are blameless.
        """
        if status in FAULTS:
            self.without = self.without | self._used if self._used else frozenset()
