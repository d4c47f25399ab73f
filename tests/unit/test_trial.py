"""The choice among ways to compute a batch, by what each shows on the device."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from embq.core.errors import DeviceError
from embq.worker.embedders.device.trial import PASSES, ROUNDS, TRIAL_S, Encode, Variant, fastest
from embq.worker.embedders.device.tuning import OptionalPaths
from embq.worker.embedders.image.forward import ImageForward, compiled
from tests.support.fakes.clock import FakeClock
from tests.support.lazy import lazy

torch = lazy("torch")


BATCH = torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2) + 1


class Timed:
    """A way that takes so long for a pass, by a clock that it moves.

    Args:
        turn: by how much its vectors are turned away from those of the others, in radians.
    """

    def __init__(self, clock: FakeClock, seconds: float, *, turn: float = 0.0) -> None:
        self.clock, self.seconds, self.turn, self.passes = clock, seconds, turn, 0

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.clock.advance(self.seconds)
        return torch.tensor([[math.cos(self.turn), math.sin(self.turn)]] * len(batch))


def way(name: str, encode: Encode, **options: Any) -> Variant:
    return Variant(name, lambda _: encode, **options)


def found(clock: FakeClock, usual: Encode, *ways: Variant, exact: torch.Tensor | None = None) -> Any:
    return fastest(usual, ways, BATCH, exact=exact, wait=lambda: None, clock=clock)


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> OptionalPaths:
    """The optional paths of the process, for this test alone."""
    paths = OptionalPaths()
    monkeypatch.setattr("embq.worker.embedders.device.trial.PATHS", paths)
    return paths


@pytest.mark.parametrize(
    ("seconds", "path"),
    [
        ((0.01, 0.0099, 0.0099), "eager"),
        ((0.01, 0.009, 0.0089), "a"),
        ((0.01, 0.009, 0.008), "a+b"),
        ((0.01, 0.02, 0.008), "b"),
        ((0.01, 0.0097, 0.0094), "a+b"),
    ],
    ids=["noise", "first", "both", "second", "a little, twice"],
)
def test_what_is_faster_by_more_than_noise_is_taken(
    clock: FakeClock, seconds: tuple[float, float, float], path: str
) -> None:
    usual, a, b = (Timed(clock, one) for one in seconds)
    result = found(clock, usual, way("a", a), way("b", b))
    assert result.path == path
    assert result.encode is {"eager": usual, "a": a, "b": b, "a+b": b}[path]
    assert result.rows_per_s == pytest.approx(dict(zip(("eager", "a", "b"), (2 / one for one in seconds), strict=True)))
    assert not result.refused


def test_each_way_is_made_of_those_that_were_taken_and_undone_where_it_was_not(clock: FakeClock) -> None:
    usual, faster, slower, last = Timed(clock, 0.01), Timed(clock, 0.005), Timed(clock, 0.02), Timed(clock, 0.004)
    undone: list[str] = []
    given: dict[str, Encode] = {}

    def of(name: str, made: Encode) -> Variant:
        def make(encode: Encode) -> Encode:
            given[name] = encode
            return made

        return Variant(name, make, lambda: undone.append(name))

    result = found(clock, usual, of("faster", faster), of("slower", slower), of("last", last))
    assert given == {"faster": usual, "slower": faster, "last": faster}
    assert (result.path, undone) == ("faster+last", ["slower"])


@pytest.mark.parametrize("turn", [0.05, math.nan, math.pi])
def test_a_way_with_other_vectors_is_not_taken_however_fast(clock: FakeClock, turn: float) -> None:
    undone: list[str] = []
    wrong = way("wrong", Timed(clock, 0.001, turn=turn), undo=lambda: undone.append("wrong"))
    result = found(clock, Timed(clock, 0.01), wrong)
    assert result.path == "eager"
    assert "error" in result.refused["wrong"]
    assert undone == ["wrong"]


@pytest.mark.parametrize(("turn", "path"), [(-0.01, "other"), (-0.005, "other"), (-0.02, "eager"), (0.0142, "eager")])
def test_a_way_is_compared_with_fp32_and_not_with_the_usual_way(clock: FakeClock, turn: float, path: str) -> None:
    exact = torch.tensor([[1.0, 0.0]] * len(BATCH))
    other = way("other", Timed(clock, 0.005, turn=turn))
    assert found(clock, Timed(clock, 0.01, turn=0.01), other, exact=exact).path == path


@pytest.mark.parametrize(("seconds", "path"), [(0.01, "graph"), (0.0102, "graph"), (0.0104, "eager")])
def test_a_graph_is_taken_on_a_tie(clock: FakeClock, seconds: float, path: str) -> None:
    graph = way("graph", Timed(clock, seconds), takes_tie=True)
    assert found(clock, Timed(clock, 0.01), graph).path == path
    assert found(clock, Timed(clock, 0.01), way("other", Timed(clock, seconds))).path == "eager"


def test_each_variant_is_announced_before_it_is_tried_and_again_where_it_is_not_taken(
    clock: FakeClock, paths: OptionalPaths
) -> None:
    told: list[object] = []
    paths.report = told.append

    def make(encode: Encode) -> Encode:
        told.append("made")
        return Timed(clock, 0.005)

    found(clock, Timed(clock, 0.01), Variant("taken", make), way("slow", Timed(clock, 0.02)))
    assert told == [["taken"], "made", ["taken"], ["slow", "taken"], ["taken"]]
    paths.clear()
    assert told[-1] == ()


def test_a_way_with_which_the_process_before_died_is_not_tried(clock: FakeClock, paths: OptionalPaths) -> None:
    paths.without = frozenset({"deadly"})
    deadly = Timed(clock, 0.001)
    result = found(clock, Timed(clock, 0.01), way("deadly", deadly), way("other", Timed(clock, 0.005)))
    assert (result.path, deadly.passes) == ("other", 0)
    assert "died" in result.refused["deadly"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ImportError("no triton"),
        TimeoutError("longer than 5 s"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_way_raises_the_others_are_tried(clock: FakeClock, error: Exception) -> None:
    def broken(_: Encode) -> Encode:
        raise error

    good = Timed(clock, 0.005)
    result = found(clock, Timed(clock, 0.01), Variant("broken", broken), way("good", good))
    assert (result.path, result.encode) == ("good", good)
    assert result.refused["broken"].startswith(type(error).__name__)


def test_a_device_that_a_way_left_broken_is_not_used(clock: FakeClock) -> None:
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    is_broken = False

    def usual(batch: torch.Tensor) -> torch.Tensor:
        if is_broken:
            raise fault
        clock.advance(0.01)
        return torch.ones(len(batch), 2)

    def breaking(_: Encode) -> Encode:
        nonlocal is_broken
        is_broken = True
        raise fault

    with pytest.raises(DeviceError, match="illegal memory access"):
        found(clock, usual, Variant("breaking", breaking))


def test_a_slow_device_is_not_kept_from_its_work_but_what_has_a_bound_of_its_own_is_tried(clock: FakeClock) -> None:
    usual, a, b = Timed(clock, TRIAL_S / (ROUNDS * PASSES)), Timed(clock, 0.001), Timed(clock, 0.001)
    result = found(clock, usual, way("a", a), way("b", b, is_bounded=False))
    assert (result.path, result.refused) == ("b", {"a": "no time"})
    assert a.passes == 0


# --- the tower ---


def tower() -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = torch.nn.Conv2d(3, 8, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5)
        return torch.nn.Sequential(*layers)


@torch.inference_mode()
def test_the_fast_way_is_for_batches_of_its_size_and_type_and_all_others_take_the_plain_one() -> None:
    module = tower()
    path = ImageForward(module, module)
    path._fast, path._suits = lambda batch: torch.full((len(batch), 5), 7.0), (4, torch.float32)
    batch = torch.randn(4, 3, 8, 8)
    assert torch.equal(path(batch), torch.full((4, 5), 7.0))
    assert torch.equal(path(batch[:3]), module(batch[:3]))
    module.double()
    assert torch.equal(path(batch.double()), module(batch.double()))


def test_a_layout_that_is_not_taken_is_undone_changes_no_vector_and_leaves_weights_that_can_be_cast() -> None:
    module = tower()
    path = ImageForward(module, module)
    batch = torch.randn(4, 8, 8, 3).permute(0, 3, 1, 2)
    kernel = module[0].weight
    with torch.inference_mode():
        before = path(batch)
        path._channels_last(path)
        assert kernel.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(path(batch), before)
    with torch.no_grad():
        module.double().float()
        kernel.copy_(kernel.clone())  # as after a row that was computed again
    with torch.inference_mode():
        path._contiguous()
        assert kernel.is_contiguous()
        assert torch.equal(path(batch), before)


def test_the_tower_in_fp32_gives_what_ways_are_compared_with_and_has_the_weights_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, half = tower(), tower().bfloat16()
    module.load_state_dict(half.state_dict())
    bits = [weights.clone() for weights in half.parameters()]
    path = ImageForward(half, half)
    batch = torch.randn(4, 3, 8, 8).bfloat16()
    with torch.inference_mode():
        exact = path._in_fp32(batch)
        assert exact is not None
        torch.testing.assert_close(exact, module(batch.float()))
        assert path._in_fp32(batch.float()) is None, "the usual way is exact"
    assert all(torch.equal(one, other) for one, other in zip(bits, half.parameters(), strict=True))
    assert half(batch).dtype == torch.bfloat16

    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(path, "_plain", full)
    with torch.inference_mode():
        assert path._in_fp32(batch) is None
    assert all(torch.equal(one, other) for one, other in zip(bits, half.parameters(), strict=True))


def test_a_tower_that_cannot_be_cast_back_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tower().bfloat16()
    path = ImageForward(module, module)

    def cast(dtype: torch.dtype) -> None:
        if dtype == torch.bfloat16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        module.to(dtype)

    monkeypatch.setattr(path, "_cast", cast)
    with torch.inference_mode(), pytest.raises(DeviceError, match="cast back"):
        path._in_fp32(torch.randn(4, 3, 8, 8).bfloat16())


def test_what_takes_longer_to_compile_than_it_may_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    slow: Callable[..., Any] = lambda encode, **_: lambda batch: let_go.wait(30)  # noqa: E731
    monkeypatch.setattr("torch.compile", slow)
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        compiled(tower(), BATCH, 0.05)
    let_go.set()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
@pytest.mark.filterwarnings("default")  # those of the compiler are its own
def test_a_compiled_pass_gives_the_vectors_of_the_plain_one() -> None:
    module = tower()
    path = ImageForward(module, module)
    batch = torch.randn(4, 8, 8, 3).permute(0, 3, 1, 2)
    made = compiled(path._plain, batch, 200)
    with torch.inference_mode():
        torch.testing.assert_close(made(batch), module(batch))


def test_what_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(encode: Encode, **options: Any) -> Encode:
        def run(batch: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no compiler")

        return run

    monkeypatch.setattr("torch.compile", no_compiler)
    with pytest.raises(RuntimeError, match="no compiler"):
        compiled(tower(), BATCH, 10)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@torch.inference_mode()
def test_a_recorded_pass_gives_the_vectors_of_each_batch_and_outlives_a_cast_of_the_model() -> None:
    from embq.worker.embedders.image.forward import Graph

    module = tower().to("cuda", torch.bfloat16)
    batches = [torch.randn(4, 3, 8, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    graph = Graph(module, batches[0], module)
    expected = [module(batch) for batch in batches]
    made = [graph(batch) for batch in batches]
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
    module.float().bfloat16()
    taken = [torch.zeros_like(weights) for weights in module.parameters() for _ in range(8)]  # where weights were
    torch.testing.assert_close(graph(batches[1]), expected[1])
    assert taken
