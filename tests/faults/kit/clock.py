"""The wall clock of chosen processes, which a test may set. Monotonic clocks are left alone, as by `date -s`.

A few lines of C stand in front of the C library (LD_PRELOAD) and add a number of nanoseconds that all of the processes
read from one shared page, so that a step takes effect in running processes at once.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none, *shift = &none;

__attribute__((constructor)) static void find_shift(void) {
    const char *path = getenv("EMBQ_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) shift = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    int failed = (int)syscall(SYS_clock_gettime, clock, out);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t now = out->tv_sec * 1000000000LL + out->tv_nsec + *shift;
        out->tv_sec = now / 1000000000LL;
        out->tv_nsec = now % 1000000000LL;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """One wall clock for all processes that are started with `environment`, or behind `prefix`.

    Args:
        folder: for the library and the shared page.

    Skips the test where there is no C compiler, or the loader does not know LD_PRELOAD.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler for the library that sets a clock")
        source, self._library, self._page = folder / "clock.c", folder / "clock.so", folder / "shift"
        source.write_text(_SOURCE)
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", self._library, source],
            check=True,
            capture_output=True,
            timeout=60,
        )
        self.set(0.0)
        self._check()

    @property
    def environment(self) -> dict[str, str | None]:
        """Environment of a process under this clock."""
        return {"LD_PRELOAD": str(self._library), "EMBQ_TEST_CLOCK": str(self._page)}

    @property
    def prefix(self) -> list[str]:
        """A program that ends by running another one with this clock."""
        return ["env", *(f"{name}={value}" for name, value in self.environment.items())]

    def set(self, seconds: float) -> None:
        """From now on the clock is this far from the true time."""
        new = self._page.with_name("new")
        if not self._page.exists():
            new.write_bytes(struct.pack("q", 0))
            new.rename(self._page)
        descriptor = os.open(self._page, os.O_WRONLY)
        try:
            os.pwrite(descriptor, struct.pack("q", int(seconds * 1e9)), 0)
        finally:
            os.close(descriptor)

    def _check(self) -> None:
        """Fail unless the shell's clock goes wrong while its uptime does not."""
        self.set(3600.0)
        told = subprocess.run([*self.prefix, "date", "+%s"], capture_output=True, text=True, timeout=10).stdout
        true = subprocess.run(["date", "+%s"], capture_output=True, text=True, timeout=10).stdout
        self.set(0.0)
        if not told.strip().isdigit() or abs(int(told) - int(true) - 3600) > 60:
            pytest.skip("LD_PRELOAD does not reach the clock here")
