"""Simulated CUDA devices in the memory of this process, with the asynchrony of real ones.

Tensors of a simulated card claim to be on `cuda:N` and hold their numbers in host memory. Nothing that is launched is
computed at once: kernels, copies, event records and waits join the queue of a stream, and run when something waits for
them. Until then memory holds `STALE` bytes. So a test sees wrong numbers where a program on a real card may:

- a copy to the host is there once an event behind it *on the same stream*, its stream or its card was waited for;
- a copy from pinned memory reads its source when it runs, not when it is launched;
- an event without a stream is recorded on the current stream of the current device, which is cuda:0 without a guard;
- a stream that uses what another one makes has to wait for an event of that one.

Cards have an amount of memory, a compute capability for which torch may have no kernels, and faults that a test sets.
Every stream, event, allocation, copy and kernel is recorded with the card it happened on.

`install` patches `torch.cuda` in this process; `installed` is the same as a context manager.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

STALE = 0xA5
"""Each byte of memory that nothing was written to yet: as float32 it is a small, finite number."""

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Architectures for which the simulated torch has kernels."""

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call"

GIB = 2**30


@dataclass(slots=True, kw_only=True)
class Card:
    """One simulated card.

    Attributes:
        capability: (major, minor).
        bytes: of memory.
        used: of them, now.
    """

    name: str = "Simulated GPU"
    capability: tuple[int, int] = (9, 0)
    bytes: int = 16 * GIB
    uuid: str = ""
    number: int = 0
    used: int = 0

    @property
    def has_kernels(self) -> bool:
        """True where code for `ARCHITECTURES` runs on it: of the same major version, not newer than the card."""
        for name in ARCHITECTURES:
            version = int(name.removeprefix("sm_"))
            if version // 10 == self.capability[0] and version % 10 <= self.capability[1]:
                return True
        return False


def make_cards(cards: Sequence[Mapping[str, Any]]) -> list[Card]:
    """The cards of a machine in PCI order; their numbers are those of `cuda:N` where all are visible."""
    made = []
    for number, told in enumerate(cards):
        card = Card(**{**told, "capability": tuple(told.get("capability", (9, 0)))}, number=number)
        card.uuid = card.uuid or f"GPU-{number:08x}-0000-4000-8000-{number:012x}"
        made.append(card)
    return made


def visible(cards: Sequence[Card], asked: str | None) -> list[Card]:
    """The cards that CUDA shows where CUDA_VISIBLE_DEVICES is `asked`: none behind the first token that is not
    valid, and none at all where one is named twice."""
    if asked is None:
        return list(cards)
    shown: list[Card] = []
    for part in asked.split(","):
        word = part.strip()
        if word.startswith("GPU-"):
            found = [card for card in cards if card.uuid.startswith(word)]
        else:
            found = [cards[int(word)]] if word.isdigit() and int(word) < len(cards) else []
        if len(found) != 1:
            break
        if found[0] in shown:
            return []
        shown += found
    return shown


class Record(NamedTuple):
    """Something that happened on a card.

    Attributes:
        kind: stream, event, wait, allocation, pinned, copy, kernel, graph or cache.
        card: number of the card in the machine, which is not that in the process where some are hidden.
    """

    kind: str
    card: int
    thread: str


# --- what is queued ---


class Queue:
    """The work of one stream, in order. Whatever is waited for runs in the thread that waits."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self.added = self.done = 0

    def add(self, work: Callable[[], object]) -> int:
        """Add work; gives its place."""
        self._work.append(work)
        self.added += 1
        return self.added

    def run_to(self, place: int) -> None:
        """Run what was added up to that place and has not run yet."""
        while self.done < place:
            work = self._work.popleft()
            self.done += 1
            work()


@dataclass(slots=True)
class State:
    """The simulated machine, as this process sees it.

    Attributes:
        cards: those that are visible; `cuda:N` is the Nth of them.
        broken: what every CUDA call of this process raises from now on.
        record_to: file to which a line `PID KIND CARD` is added for each kind of record of each card.
    """

    cards: list[Card]
    record_to: str = ""
    broken: str = ""
    records: list[Record] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    local: Any = field(default_factory=threading.local)
    seen: set[tuple[str, int]] = field(default_factory=set)

    def note(self, kind: str, index: int) -> None:
        """Record what happens on the card `index` of this process; raises what the card's state makes of it."""
        card = self.cards[index]
        self.records.append(Record(kind, card.number, threading.current_thread().name))
        if self.record_to and (kind, card.number) not in self.seen:
            self.seen.add((kind, card.number))
            with open(self.record_to, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {kind} {card.number}\n")
        self.check()

    def check(self) -> None:
        """Raise where the context is broken."""
        if self.broken:
            raise accelerator_error(self.broken)


def accelerator_error(message: str) -> RuntimeError:
    """The exception of torch for an error of CUDA: since 2.8 a kind of RuntimeError of its own."""
    import torch

    kind: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
    return kind(message + ADVICE)


STATE: State | None = None
"""State of the cards that are installed in this process."""


def state() -> State:
    """The state; the cards have to be installed."""
    assert STATE is not None, "no simulated cards are installed"
    return STATE


def break_device(message: str = ILLEGAL) -> None:
    """From now on every CUDA call of this process raises this, as after a fault in a kernel."""
    if STATE is not None:
        STATE.broken = message


def assert_only_on(*numbers: int, kinds: Sequence[str] = ()) -> None:
    """Fail where anything, or nothing, happened on another card.

    Args:
        kinds: of each of them there has to be a record.
    """
    records = state().records
    elsewhere = sorted({f"{one.kind} on cuda:{one.card} by {one.thread}" for one in records if one.card not in numbers})
    assert not elsewhere, f"not on {numbers}: {', '.join(elsewhere)}"
    missing = set(kinds or ["kernel"]) - {one.kind for one in records}
    assert not missing, f"nothing of {missing} happened at all"


# --- torch ---


def _make() -> SimpleNamespace:
    """Everything that needs torch, made when the cards are installed."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    @contextmanager
    def plainly() -> Iterator[None]:
        """Ordinary tensors, whatever the caller's mode is: work runs later, under another one."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    # --- devices and streams ---

    def current() -> int:
        return getattr(state().local, "device", 0)

    def index_of(device: Any = None) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        index = current() if index is None or index < 0 else index
        if index >= len(state().cards):
            raise accelerator_error("CUDA error: invalid device ordinal")
        return index

    def exchange(index: int) -> int:
        before = current()
        if index >= 0 and index != before:
            state().check()
            state().local.device = index
        return before

    numbers = itertools.count(1)
    defaults: dict[int, Stream] = {}

    class Stream:
        """`torch.cuda.Stream`."""

        def __init__(self, device: Any = None, priority: int = 0, *, default: bool = False, **_: Any) -> None:
            self.device_index = index_of(device)
            self.device = torch.device("cuda", self.device_index)
            self.priority = priority
            self.queue = Queue()
            self.cuda_stream = 0 if default else next(numbers)
            if not default:
                state().note("stream", self.device_index)
            every[self.device_index].append(self)

        def add(self, work: Callable[[], object]) -> None:
            """Launch; while a graph is recorded, into that."""
            with state().lock:
                graph = getattr(state().local, "graph", None)
                if graph is not None and graph.stream is self:
                    graph.work.append(work)
                else:
                    self.queue.add(work)

        def synchronize(self) -> None:
            refuse_capture(self)
            state().check()
            with state().lock, plainly():
                self.queue.run_to(self.queue.added)

        def query(self) -> bool:
            state().check()
            return self.queue.done == self.queue.added

        def wait_event(self, event: Event) -> None:
            state().note("wait", self.device_index)
            waited = event.place  # as it was recorded when the wait was launched
            if waited is not None:
                self.add(lambda: waited[0].run_to(waited[1]))

        def wait_stream(self, stream: Stream) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def __repr__(self) -> str:
            return f"<stream {self.cuda_stream} of {self.device}>"

    every: list[list[Stream]] = [[] for _ in state().cards]

    def default_stream(device: Any = None) -> Stream:
        index = index_of(device)
        if index not in defaults:
            defaults[index] = Stream(index, default=True)
        return defaults[index]

    def current_stream(device: Any = None) -> Stream:
        index = index_of(device)
        streams: dict[int, Stream] = state().local.__dict__.setdefault("streams", {})
        return streams.get(index) or default_stream(index)

    def set_stream(stream: Stream) -> None:
        exchange(stream.device_index)
        state().local.__dict__.setdefault("streams", {})[stream.device_index] = stream

    class stream_context:  # `torch.cuda.stream`
        def __init__(self, stream: Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.device = current()
                self.before = current_stream(self.stream.device_index)
                set_stream(self.stream)

        def __exit__(self, *_: Any) -> None:
            if self.stream is not None:
                set_stream(self.before)
                exchange(self.device)

    class Event:
        """`torch.cuda.Event`: on the device of the stream that records it first."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.device: Any = None
            self.place: tuple[Queue, int] | None = None

        def record(self, stream: Stream | None = None) -> None:
            stream = stream or current_stream()
            if self.device is not None and self.device != stream.device:
                raise RuntimeError(f"Event device {self.device} does not match stream device {stream.device}")
            self.device = stream.device
            state().note("event", stream.device_index)
            with state().lock:
                self.place = stream.queue, stream.queue.added

        def wait(self, stream: Stream | None = None) -> None:
            (stream or current_stream()).wait_event(self)

        def synchronize(self) -> None:
            if self.place is not None:
                state().check()
                with state().lock, plainly():
                    self.place[0].run_to(self.place[1])

        def query(self) -> bool:
            """True once it is over; a device goes on while the host looks, so it is at the next look."""
            if self.place is None:
                return True
            state().check()
            is_over = self.place[0].done >= self.place[1]
            if not is_over:
                self.synchronize()
            return is_over

    def synchronize(device: Any = None) -> None:
        index = index_of(device)
        state().check()
        for stream in every[index]:
            stream.synchronize()

    # --- graphs ---

    def refuse_capture(stream: Stream) -> None:
        graph = getattr(state().local, "graph", None)
        if graph is not None and graph.stream is stream:
            raise accelerator_error("CUDA error: operation not permitted when stream is capturing")

    class CUDAGraph:
        """The launches of its recording; a replay reads and writes the same memory each time."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.work: list[Callable[[], object]] = []
            self.stream: Stream | None = None

        def capture_begin(self, *_: Any, **__: Any) -> None:
            self.stream = current_stream()
            state().note("graph", self.stream.device_index)
            state().local.graph = self

        def capture_end(self) -> None:
            state().local.graph = None

        def replay(self) -> None:
            stream = current_stream()
            state().note("kernel", stream.device_index)
            assert self.stream is not None
            if stream.device != self.stream.device:
                raise accelerator_error("CUDA error: invalid resource handle")
            for work in self.work:
                stream.add(work)

        def reset(self) -> None:
            self.work.clear()

    class graph_context:  # `torch.cuda.graph`
        def __init__(self, graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> None:
            self.graph = graph
            self.on = stream_context(stream or Stream())

        def __enter__(self) -> None:
            synchronize()
            self.on.__enter__()
            self.graph.capture_begin()

        def __exit__(self, *error: Any) -> None:
            self.graph.capture_end()
            self.on.__exit__(*error)

    # --- memory ---

    class Block:
        """Memory of a card; given back when the storage that carries this goes."""

        def __init__(self, card: Card, size: int) -> None:
            self.card, self.size = card, size

        def __del__(self) -> None:
            self.card.used -= self.size

    def fill_stale(data: torch.Tensor) -> torch.Tensor:
        if data.dtype == torch.bool or not data.is_contiguous() or data.numel() > 2**20:  # of weights it takes long
            return data.zero_()
        data.view(-1).view(torch.uint8).fill_(STALE)
        return data

    def take(data: torch.Tensor, index: int) -> torch.Tensor:
        """Count the storage of a tensor as the card's memory."""
        storage: Any = data.untyped_storage()
        if getattr(storage, "block", None) is None:
            state().note("allocation", index)
            card, size = state().cards[index], storage.nbytes()
            if card.used + size > card.bytes and getattr(state().local, "graph", None) is None:
                synchronize(index)  # what is launched holds memory that torch would have used again by now
            if card.used + size > card.bytes:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU {index} has a total capacity "
                    f"of {card.bytes / GIB:.2f} GiB of which {max(0, card.bytes - card.used) / GIB:.2f} GiB is free"
                )
            card.used += size
            storage.block = Block(card, size)
        return data

    def is_pinned(data: torch.Tensor) -> bool:
        return getattr(data.untyped_storage(), "pinned", False)

    def pinned(data: torch.Tensor) -> torch.Tensor:
        state().note("pinned", current())
        storage: Any = data.untyped_storage()
        storage.pinned = True
        return data

    # --- tensors ---

    class CudaTensor(torch.Tensor):
        """A tensor of a simulated card; `held` has its numbers, on the host."""

        held: torch.Tensor

        @staticmethod
        def __new__(cls, held: torch.Tensor, index: int) -> CudaTensor:
            take(held, index)
            made: CudaTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device("cuda", index),
            )
            made.held = held
            return made

        # By these torch.nn.Module.to knows that it has to swap parameters, and not only what they point to.
        def __tensor_flatten__(self) -> tuple[list[str], int]:
            return ["held"], self.device.index

        @staticmethod
        def __tensor_unflatten__(inner: dict[str, Any], index: int, size: Any, stride: Any) -> CudaTensor:
            return CudaTensor(inner["held"], index)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return dispatch(func, args, kwargs or {})

        def tolist(self) -> Any:
            return self.cpu().tolist()

        def __repr__(self, **_: Any) -> str:  # type: ignore[override]
            return f"<{self.dtype} of shape {tuple(self.shape)} on {self.device}>"

    def launched(index: int, kind: str, work: Callable[[], object]) -> None:
        state().note(kind, index)
        if kind == "kernel" and not state().cards[index].has_kernels:
            raise accelerator_error(NO_KERNEL)
        current_stream(index).add(work)

    def tensors_in(values: Any) -> Iterator[torch.Tensor]:
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from tensors_in(value)

    def mapped(value: Any, of_tensor: Callable[[torch.Tensor], Any], device: str) -> Any:
        """The arguments for another device."""
        if isinstance(value, torch.Tensor):
            return of_tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)([mapped(one, of_tensor, device) for one in value])
        if isinstance(value, dict):
            return {name: mapped(one, of_tensor, device) for name, one in value.items() if name != "pin_memory"}
        return torch.device(device) if isinstance(value, torch.device) else value

    def inner(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.held if isinstance(tensor, CudaTensor) else tensor

    def unlike(tensor: torch.Tensor) -> torch.Tensor:
        held = inner(tensor)
        return torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device="meta")

    def wrapped(values: Any, index: int) -> Any:
        if isinstance(values, torch.Tensor):
            return CudaTensor(values, index)
        return type(values)(wrapped(one, index) for one in values) if isinstance(values, (list, tuple)) else values

    def new_like(values: Any, index: int) -> Any:
        """Memory on the host for results of these shapes; none of it is written yet."""
        if isinstance(values, torch.Tensor):
            made = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype)
            return take(fill_stale(made), index)
        return type(values)([new_like(one, index) for one in values]) if isinstance(values, (list, tuple)) else values

    def store(made: Any, results: Any) -> None:
        if isinstance(made, torch.Tensor):
            if results is not None:  # some kernels leave an output out that nobody reads
                made.copy_(results)
        elif isinstance(made, (list, tuple)):
            for one, result in zip(made, results, strict=True):
                store(one, result)

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do as torch would, for any operator with a tensor of a card, or that makes one."""
        on = {tensor.device.index for tensor in tensors_in((args, kwargs)) if isinstance(tensor, CudaTensor)}
        devices = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
        asked = devices[0] if devices else None
        if not on and (asked is None or asked.type != "cuda"):
            return on_host(func, args, kwargs)
        special = SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func.namespace == "aten" and func not in WHOLE and func.has_kernel_for_dispatch_key(IMPLICIT):
            with Mode():
                return func.decompose(*args, **kwargs)
        if len(on) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two: cuda:{on}")
        if on and func not in INDEXING:
            for tensor in tensors_in((args, kwargs)):
                if not isinstance(tensor, CudaTensor) and tensor.dim():
                    raise RuntimeError("Expected all tensors to be on the same device, but found cpu and cuda")
        index = on.pop() if on else index_of(asked)
        return computed(func, args, kwargs, index)

    def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> Any:
        given, named = mapped(args, inner, "cpu"), mapped(kwargs, inner, "cpu")
        run = functools.partial(func, *given, **named)
        if func.is_view:
            with plainly():
                viewed = run()
            # A view is an inference tensor where its base is one, whatever the mode is now.
            with torch.inference_mode(args[0].is_inference()):
                return wrapped(viewed, index)
        if func._schema.is_mutable:
            launched(index, "kernel", run)
            return kwargs["out"] if "out" in kwargs else args[0]
        if func in EMPTY:
            with plainly():
                made = fill_stale(run())
            return wrapped(made, index)
        with plainly():
            try:
                shapes = func(*mapped(args, unlike, "meta"), **mapped(kwargs, unlike, "meta"))
            except (NotImplementedError, RuntimeError):  # its shape depends on numbers: the host waits for them
                shapes = None
            if shapes is None:
                launched(index, "kernel", lambda: None)
                current_stream(index).synchronize()
                made = run()
            else:
                made = new_like(shapes, index)
        if shapes is not None:
            launched(index, "kernel", lambda: store(made, run()))
        return wrapped(made, index)

    def on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.is_pinned.default:
            return is_pinned(args[0])
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return args[0] if is_pinned(args[0]) else pinned(args[0].clone())
        if func is aten._to_copy.default and kwargs.get("non_blocking"):
            kwargs = {**kwargs, "non_blocking": False}
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return pinned(func(*args, **{**kwargs, "pin_memory": False}))

    # --- copies ---

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """`copy_` where one or both are on a card."""
        into, out_of = inner(target), inner(source)
        if isinstance(target, CudaTensor) and isinstance(source, CudaTensor):
            if target.device == source.device:
                launched(target.device.index, "kernel", lambda: into.copy_(out_of))
                return target
            launched(source.device.index, "copy", lambda: None)
            current_stream(source.device.index).synchronize()
            non_blocking = False
        index = (target if isinstance(target, CudaTensor) else source).device.index
        host = source if isinstance(target, CudaTensor) else target
        if not isinstance(host, CudaTensor) and not is_pinned(host):
            # From ordinary memory CUDA copies to its own first; to it, it waits.
            if isinstance(target, CudaTensor):
                with plainly():
                    out_of = out_of.clone()
            else:
                non_blocking = False
        launched(index, "copy", lambda: into.copy_(out_of))
        if not non_blocking:
            current_stream(index).synchronize()
        return target

    def to_copy(
        tensor: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
        memory_format: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """`_to_copy`: with a cast on the side of the card, as torch does it."""
        device = tensor.device if device is None else torch.device(device)
        with plainly():
            like = torch.empty_like(unlike(tensor), dtype=dtype, memory_format=memory_format or torch.preserve_format)
        if device.type == "cuda":
            index = index_of(device)
            with plainly():
                made = new_like(like, index)
            return copied(CudaTensor(made, index), tensor, non_blocking)
        with plainly():
            made = fill_stale(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
        if non_blocking:
            pinned(made)
        return copied(made, tensor, non_blocking)

    def number_of(tensor: torch.Tensor) -> Any:
        """`item`: the host waits."""
        index = tensor.device.index
        launched(index, "copy", lambda: None)
        current_stream(index).synchronize()
        with plainly():
            return inner(tensor).item()

    def varlen(query: Any, key: Any, value: Any, starts: Any, *others: Any, **named: Any) -> Any:
        """`torch_attn::_varlen_attn`, which is what the flat path calls: each text alone."""
        given = dict(zip(VARLEN, others, strict=False)) | named
        q, k, v, cuts = (inner(one) for one in (query, key, value, starts))
        index = query.device.index
        with plainly():
            made = new_like(unlike(query), index)
        window = given.get("window_size") or [-1, -1]

        def run() -> None:
            bounds = cuts.tolist()
            for start, end in itertools.pairwise(bounds):
                one = [whole[start:end].transpose(0, 1).float() for whole in (q, k, v)]
                places = torch.arange(end - start)
                near = None if window[0] < 0 else (places[:, None] - places).abs() <= window[0]
                vectors = torch.nn.functional.scaled_dot_product_attention(
                    *one, attn_mask=near, scale=given.get("scale")
                )
                made[start:end] = vectors.transpose(0, 1).to(made.dtype)

        launched(index, "kernel", run)
        rest = [torch.empty(0), torch.empty(0)]
        return (wrapped(made, index), *(wrapped(one, index) for one in rest))

    VARLEN = ("cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size")
    IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
    INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._unsafe_index.Tensor}
    EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
    WHOLE = {
        aten.linear.default,
        aten.scaled_dot_product_attention.default,
        aten.layer_norm.default,
        aten.conv2d.default,
        aten.gelu.default,
    }
    """Operators that inference mode hands over whole, and that would ask the driver if they were taken apart."""
    SPECIAL = {
        aten.copy_.default: copied,
        aten._to_copy.default: to_copy,
        aten._local_scalar_dense.default: number_of,
    }

    class Mode(TorchDispatchMode):
        """For what no tensor of a card is part of yet: it is on in every thread while the cards are installed."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "torch_attn" and func not in SPECIAL:
                SPECIAL[func] = varlen
            return dispatch(func, args, kwargs or {})

    # --- torch.cuda ---

    def capability(device: Any = None) -> tuple[int, int]:
        return state().cards[index_of(device)].capability

    def properties(device: Any = None) -> SimpleNamespace:
        card = state().cards[index_of(device)]
        major, minor = card.capability
        return SimpleNamespace(
            name=card.name, major=major, minor=minor, total_memory=card.bytes, multi_processor_count=1,
            uuid=card.uuid.removeprefix("GPU-"), gcnArchName="",
        )  # fmt: skip

    def memory(device: Any = None) -> tuple[int, int]:
        card = state().cards[index_of(device)]
        state().check()
        return card.bytes - card.used, card.bytes

    def empty_cache() -> None:
        state().note("cache", current())

    def bf16(including_emulation: bool = True) -> bool:
        return including_emulation or capability()[0] >= 8

    used = functools.partial(lambda device=None: state().cards[index_of(device)].used)
    cuda = {
        "is_available": lambda: bool(state().cards),
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: len(state().cards),
        "current_device": current,
        "set_device": lambda device: exchange(index_of(device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph_context,
        "stream": stream_context,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: getattr(state().local, "graph", None) is not None,
        "empty_cache": empty_cache,
        "mem_get_info": memory,
        "memory_allocated": used,
        "memory_reserved": used,
        "max_memory_allocated": used,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: state().cards[index_of(device)].name,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_arch_list": lambda: list(ARCHITECTURES),
        "is_bf16_supported": bf16,
    }
    return SimpleNamespace(mode=Mode, cuda=cuda, tensor=CudaTensor)


def install(
    cards: Sequence[Mapping[str, Any]], *, cuda_visible: str | None = None, record_to: str = ""
) -> Callable[[], None]:
    """Put the visible ones of these cards into this process; gives what takes them away again.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES.
        record_to: file to which each process adds a line `PID KIND CARD` for each kind of record of each card.
    """
    import torch

    global STATE
    STATE = State(visible(make_cards(cards), cuda_visible), record_to=record_to)
    made = _make()
    undo: list[Callable[[], object]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    for name, value in made.cuda.items():
        put(torch.cuda, name, value)
    put(torch.backends.cudnn, "version", lambda: None)
    lifts = torch._C._only_lift_cpu_tensors()
    undo.append(lambda: torch._C._set_only_lift_cpu_tensors(lifts))
    # Or torch.tensor(..., device="cuda") would ask the driver before anything here sees it.
    torch._C._set_only_lift_cpu_tensors(True)
    # Indexing in C++ sets the tensor's device; where there is none this makes it do nothing, for good.
    torch._C._ensureCUDADeviceGuardSet()
    run = threading.Thread.run

    def run_with_cards(thread: threading.Thread) -> None:
        if STATE is None:
            run(thread)
            return
        with made.mode():
            run(thread)

    put(threading.Thread, "run", run_with_cards)
    mode = made.mode()
    mode.__enter__()

    def remove() -> None:
        global STATE
        mode.__exit__(None, None, None)
        for one in reversed(undo):
            one()
        STATE = None

    return remove


@contextmanager
def installed(cards: Sequence[Mapping[str, Any]] = ({}, {}), **options: Any) -> Iterator[State]:
    """The cards while this is open, for this thread and those that are started meanwhile."""
    remove = install(cards, **options)
    try:
        yield state()
    finally:
        remove()
