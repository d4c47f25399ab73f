"""Sabotage of a process from inside, so that the product holds no switches for tests.

Python imports this module at its start where this folder is on PYTHONPATH. EMBQ_SABOTAGE holds a JSON list of entries;
each wraps one function or method when its module has been imported.

``{"at": "embq.worker.stages.publish:PublishStage.run", "do": "kill"}``
    What happens at a call of it. More keys:

    ``when``      "before" the call (default) or "after" it
    ``count``     from which call in this process on (default 1); it happens once, or with ``every`` at all later calls
    ``match``     only calls whose arguments contain this text count
    ``more_than`` only calls whose last argument has more items than this count
    ``marker``    path: it happens ``times`` times (default 1) in all processes together
    ``device``    only in the worker process of this device
    ``tally``     path: one byte is appended each time that it happens

``{"poison": "<text>", "where": "read" | "prepare" | "embed", "do": "kill"}``
    Each time that the sample with this text is handled; ``where`` names the stage (of the stub model for the last two).

``{"slow": 3.0}``
    `embed` of the stub takes three times as long.

``{"slow_read": 0.5}``
    Each sample takes half a second to read.

``{"server": "/usr/bin/redis-server"}``
    The server that `embq run` starts.

``{"cards": [{"name": "A", "uuid": "GPU-1", "capability": [9, 0], "bytes": 17179869184}], "record": "<path>"}``
    The GPUs of the machine, for NVML and for torch, as CUDA_VISIBLE_DEVICES shows them: see
    `tests/support/fakes/cuda.py`. Every key of a card may be left out. ``record`` is a file of lines `PID KIND CARD`:
    what happened on which card.

``{"set": "embq.core.queue.keys:VERSION", "to": 99}``
    Another value of a constant, before anybody has imported it.

``do`` is one of: ``kill`` (SIGKILL), ``exit`` (with ``status``), ``stop`` (SIGSTOP), ``hang``, ``hang_gil`` (a C call
that never returns and keeps every other thread from running), ``pause`` (``seconds``), ``gate`` (creates the file
``<gate>.reached`` and waits for ``<gate>.open``), ``raise_device``, ``raise_full`` (as the embedders say it),
``raise_oom`` (torch.OutOfMemoryError),
``raise_no_kernel`` (as of a card for which torch has no code), ``raise_sticky`` (an illegal memory access, after which
every call to the simulated cards of ``cards`` fails),
``raise`` (``error``: name of a built-in exception), ``allocate`` (more memory than RLIMIT_AS allows), ``no_room``
(RLIMIT_AS of what is used now, so that no thread can be started any more),
``signal`` (``number``, to itself), ``segfault`` (a C call that reads what is not its own), ``abort`` (what an assertion
in C does).

The first call of `prepare` and the first two of `embed` are the warm-up, which no unit is charged for.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

STUB = "embq.worker.embedders.stub:StubEmbedder"


def _act(entry):
    do = entry["do"]
    if do in ("segfault", "abort"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if "tally" in entry:
        with open(entry["tally"], "a") as tally:
            tally.write("x")
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "exit":
        os._exit(entry["status"])
    elif do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "signal":
        os.kill(os.getpid(), entry["number"])
    elif do == "segfault":
        ctypes.string_at(0)
    elif do == "abort":
        os.abort()
    elif do == "hang":
        while True:
            time.sleep(3600)
    elif do == "hang_gil":
        # No signal may end the C call, as none ends a wedged driver's.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            ctypes.PyDLL(None).sleep(3600)
    elif do == "pause":
        time.sleep(entry["seconds"])
    elif do == "gate":
        open(f"{entry['gate']}.reached", "a").close()
        while not os.path.exists(f"{entry['gate']}.open"):
            time.sleep(0.01)
    elif do == "raise_device":
        from embq.core.errors import DeviceError

        raise DeviceError("the device failed: CUDA error: an illegal memory access was encountered")
    elif do == "raise_full":
        from embq.core.errors import DeviceFullError

        raise DeviceFullError("the memory of the device is too small: CUDA out of memory")
    elif do == "raise_oom":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    elif do == "raise_no_kernel":
        cuda = _fake("cuda")
        raise cuda.accelerator_error(cuda.NO_KERNEL)
    elif do == "raise_sticky":
        cuda = _fake("cuda")
        cuda.break_device()
        raise cuda.accelerator_error(cuda.ILLEGAL)
    elif do == "no_room":
        resource.setrlimit(resource.RLIMIT_AS, (_used() + 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    elif do == "allocate":
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_used() + 64 * 2**20, before[1]))
        try:
            bytearray(2**30)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    elif do == "raise":
        raise getattr(builtins, entry["error"])("sabotage")
    else:
        raise ValueError(f"nothing is known of {entry}")


def _used():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _views(value):
    """The images of samples that are views of a shard's memory, of which `repr` shows nothing."""
    if isinstance(value, (list, tuple)):
        return [view for one in value for view in _views(one)]
    image = getattr(value, "image", None)
    return [bytes(image)] if isinstance(image, memoryview) else []


def _allowed(entry):
    """True if it may happen here and now, over all processes."""
    device = entry.get("device")
    if device is not None and f'"device": "{device}"' not in sys.orig_argv[-1]:
        return False
    marker = entry.get("marker")
    if marker is None:
        return True
    for n in range(entry.get("times", 1)):
        try:
            os.close(os.open(f"{marker}.{n}" if n else marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        return True
    return False


def _at_calls(entry):
    lock = threading.Lock()
    calls = 0

    def happen(args, kwargs):
        nonlocal calls
        if "match" in entry and entry["match"] not in f"{(args, kwargs)!r}{_views(args)!r}":
            return
        if "more_than" in entry and len(args[-1]) <= entry["more_than"]:
            return
        with lock:
            calls += 1
            due = calls >= entry.get("count", 1) if entry.get("every") else calls == entry.get("count", 1)
        if due and _allowed(entry):
            _act(entry)

    def wrap(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if entry.get("when", "before") == "before":
                happen(args, kwargs)
                return function(*args, **kwargs)
            result = function(*args, **kwargs)
            happen(args, kwargs)
            return result

        return wrapper

    return wrap


def _poison_of_read(entry):
    def wrap(read):
        @functools.wraps(read)
        def wrapper(*args, **kwargs):
            for sample in read(*args, **kwargs):
                if sample.text == entry["poison"] and _allowed(entry):
                    _act(entry)
                yield sample

        return wrapper

    return wrap


def _poison_of_prepare(entry):
    def wrap(prepare):
        @functools.wraps(prepare)
        def wrapper(self, samples):
            if any(sample.text == entry["poison"] for sample in samples) and _allowed(entry):
                _act(entry)
            return prepare(self, samples)

        return wrapper

    return wrap


def _poison_of_embed(entry):
    def wrap(embed):
        @functools.wraps(embed)
        def wrapper(self, batch):
            from embq.worker.embedders.stub import stub_digest

            digest = stub_digest(entry["poison"].encode(), next(iter(self.dims.values())))
            if any(digest in prepared.digests for prepared in batch) and _allowed(entry):
                _act(entry)
            return embed(self, batch)

        return wrapper

    return wrap


def _slow(entry):
    def wrap(embed):
        @functools.wraps(embed)
        def wrapper(self, batch):
            began = time.monotonic()
            result = embed(self, batch)
            time.sleep((time.monotonic() - began) * (entry["slow"] - 1))
            return result

        return wrapper

    return wrap


def _slow_read(entry):
    def wrap(read):
        @functools.wraps(read)
        def wrapper(*args, **kwargs):
            for sample in read(*args, **kwargs):
                time.sleep(entry["slow_read"])
                yield sample

        return wrapper

    return wrap


def _another_server(entry):
    def wrap(_server_binary):
        from pathlib import Path

        return lambda: Path(entry["server"])

    return wrap


def _fake(name):
    """A module of tests/support/fakes, which is not on this process's path."""
    module = f"tests.support.fakes.{name}"
    if module not in sys.modules:
        path = Path(__file__).parents[3] / "support" / "fakes" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


def _cards(entry):
    """Cards for NVML at once, and for torch when it has been imported."""
    made, nvml = _fake("cuda").make_cards(entry["cards"]), _fake("nvml")
    sys.modules["pynvml"] = nvml.fake_nvml(
        *(nvml.Card(name=card.name, uuid=card.uuid, capability=card.capability, bytes=card.bytes) for card in made)
    )

    def wrap(version):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        _fake("cuda").install(entry["cards"], cuda_visible=shown, record_to=entry.get("record", ""))
        return version

    return wrap


def _target_and_wrap(entry):
    """The place that an entry changes, and how."""
    if "at" in entry:
        return entry["at"], _at_calls(entry)
    if "poison" in entry:
        return {
            "read": ("embq.sources.unit_reader:read", _poison_of_read(entry)),
            "prepare": (f"{STUB}.prepare", _poison_of_prepare(entry)),
            "embed": (f"{STUB}.embed", _poison_of_embed(entry)),
        }[entry["where"]]
    if "slow" in entry:
        return f"{STUB}.embed", _slow(entry)
    if "cards" in entry:
        return "torch:__version__", _cards(entry)
    if "set" in entry:
        return entry["set"], lambda _value: entry["to"]
    if "slow_read" in entry:
        return "embq.sources.unit_reader:read", _slow_read(entry)
    if "server" in entry:
        return "embq.core.broker.embedded:server_binary", _another_server(entry)
    raise ValueError(f"nothing is known of {entry}")


def _patch(module, path, wrap):
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    raw = owner.__dict__[name]
    if isinstance(raw, (staticmethod, classmethod)):
        setattr(owner, name, type(raw)(wrap(raw.__func__)))
    else:
        setattr(owner, name, wrap(raw))


class _Loader(importlib.abc.Loader):
    """The real loader, and the patches after it."""

    def __init__(self, loader, patches):
        self._loader = loader
        self._patches = patches

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        for path, wrap in self._patches:
            _patch(module, path, wrap)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches):
        self._patches = patches

    def find_spec(self, name, path, target=None):
        if name not in self._patches:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if (spec := finder.find_spec(name, path, target)) is not None:
                spec.loader = _Loader(spec.loader, self._patches.pop(name))
                return spec
        return None


def _install(entries):
    patches = {}
    for entry in entries:
        target, wrap = _target_and_wrap(entry)
        module, path = target.split(":")
        if module in sys.modules:
            _patch(sys.modules[module], path, wrap)
        else:
            patches.setdefault(module, []).append((path, wrap))
    if patches:
        sys.meta_path.insert(0, _Finder(patches))


try:
    _install(json.loads(os.environ.get("EMBQ_SABOTAGE", "[]")))
except BaseException:  # noqa: BLE001 - Python would go on without the sabotage, and the test would prove nothing
    traceback.print_exc()
    os._exit(99)
