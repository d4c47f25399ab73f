"""The precision of a run without --precision, and the devices that refuse one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from embq.app.cli.precision import precision_of_upload
from embq.app.verbs import run as verbs
from embq.core import wire
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import InputError, ModelError
from embq.core.models import ModelConfig
from embq.core.queue.heartbeats import SERVICE_REPORTS, Device, Service
from embq.core.queue.reporting import this_service
from embq.core.queue.runs import RunRecord
from embq.core.queue.runs import register as register_run
from embq.core.queue.scripts import load_scripts
from embq.core.queue.uploads import Upload, announce
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from embq.producer.model_args import choose_precision, registered_devices
from embq.worker.embedders.device.hardware import precisions_of
from embq.worker.embedders.device.placement import dtype_of
from embq.worker.supervisor.devices import Gpu, torch_architectures
from embq.worker.supervisor.machine import described
from tests.e2e.session import write_texts
from tests.support.lazy import lazy

torch = lazy("torch")


AMPERE, VOLTA, FP32 = ("bf16", "fp16", "fp32"), ("fp16", "fp32"), ("fp32",)


def device(name: str, precisions: tuple[str, ...], at: str = "cuda:0", state: str = "idle") -> Device:
    return Device(device=at, name=name, state=state, worker="", precisions=precisions)


H100, V100, CPU = device("NVIDIA H100", AMPERE), device("Tesla V100", VOLTA), device("Xeon, 8 cores", FP32, "cpu")
K80 = device("Tesla K80, which torch has no code for", (), "cuda:1")


# --- the rule ---


@pytest.mark.parametrize(
    ("capability", "architecture", "fast"),
    [
        ((10, 0), "", AMPERE),
        ((9, 0), "", AMPERE),
        ((8, 0), "", AMPERE),
        ((7, 5), "", VOLTA),
        ((7, 0), "", VOLTA),
        ((6, 1), "", FP32),
        ((6, 0), "", FP32),
        ((3, 7), "", FP32),
        (None, "", FP32),
        (None, "gfx942:sramecc+:xnack-", AMPERE),
        (None, "gfx90a:sramecc+:xnack-", AMPERE),
        (None, "gfx1100", AMPERE),
        (None, "gfx908", VOLTA),
        (None, "gfx1030", VOLTA),
    ],
)
def test_what_a_gpu_computes_fast_follows_from_its_generation(
    capability: tuple[int, int] | None, architecture: str, fast: tuple[str, ...]
) -> None:
    assert precisions_of(capability, architecture) == fast


def test_a_machine_reports_what_each_device_computes_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        Gpu(number=0, visible="GPU-a", name="NVIDIA H100", capability=(9, 0), memory_bytes=1),
        Gpu(number=1, visible="GPU-b", name="Tesla T4", capability=(7, 5), memory_bytes=1),
    ]
    monkeypatch.setattr("embq.worker.supervisor.machine.find_gpus", lambda visible: tuple(cards))
    monkeypatch.delattr("embq.worker.supervisor.machine.torch_architectures")
    told = described(["cuda:0", "cuda:1", "cuda:2", "cpu", "sim:3"], None)
    assert {name: one.precisions for name, one in told.items()} == {
        "cuda:0": AMPERE,
        "cuda:1": VOLTA,
        "cuda:2": FP32,
        "cpu": FP32,
        "sim:3": FP32,
    }
    assert told["cuda:1"].name == "Tesla T4"


def test_a_gpu_that_the_installed_torch_has_no_code_for_has_no_precision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(__file__).parent.parent / "faults" / "kit" / "cards"
    cards = {"NVIDIA H100": (9, 0), "Tesla V100": (7, 0), "Tesla K80": (3, 7)}
    gpus = [
        Gpu(number=number, visible="", name=name, capability=capability, memory_bytes=1)
        for number, (name, capability) in enumerate(cards.items())
    ]
    monkeypatch.setattr("embq.worker.supervisor.machine.find_gpus", lambda visible: tuple(gpus))
    monkeypatch.setenv("PYTHONPATH", str(folder))  # a torch with code for 7.5 and above
    torch_architectures.cache_clear()
    told = described(["cuda:0", "cuda:1", "cuda:2"], None)
    torch_architectures.cache_clear()
    assert {one.name: one.precisions for one in told.values()} == {
        "NVIDIA H100": AMPERE,
        "Tesla V100": (),
        "Tesla K80": (),
    }
    assert choose_precision(list(told.values())).precision == "bf16"


@pytest.mark.parametrize(
    ("devices", "precision", "told"),
    [
        (
            [H100, H100],
            "bf16",
            "the fastest float type on every device (2 x NVIDIA H100); --precision chooses another one",
        ),
        ([V100], "fp16", "the fastest float type on every device (Tesla V100)"),
        ([CPU], "fp32", "the fastest float type on every device (Xeon, 8 cores)"),
        ([H100, V100], "fp16", "the fastest float type on every device (NVIDIA H100, Tesla V100); --precision chooses"),
        (
            [H100, V100, CPU],
            "fp32",
            "bf16 is faster on NVIDIA H100, up to 14.8 times by data sheets, and not on Tesla V100, Xeon, 8 cores",
        ),
        ([H100, K80], "bf16", "the fastest float type on every device (NVIDIA H100)"),
        ([K80], "fp32", "no usable device is registered"),
        ([], "fp32", "no usable device is registered; for GPUs with tensor cores start the workers first, or give "),
        ([device(f"GPU {n}", AMPERE) for n in range(9)], "bf16", " and 5 other kinds); --precision"),
    ],
)
def test_a_run_takes_the_first_precision_that_is_fast_on_every_device(
    devices: list[Device], precision: str, told: str
) -> None:
    choice = choose_precision(devices)
    assert choice.precision == precision
    assert choice.reason.startswith(f"precision {precision}: ")
    assert told in choice.reason


# --- from what the broker knows ---


def worker(*devices: Device, run: str = "", role: str = "worker") -> Service:
    return replace(this_service(role, version="1.0", run=run), devices=devices)


def register(client: redis.Redis, *services: Service) -> None:
    for service in services:
        SERVICE_REPORTS.report(client, service, scripts=load_scripts(client))


def test_devices_that_would_serve_a_new_run_are_asked(own_client: redis.Redis) -> None:
    assert registered_devices(own_client) == []
    register(
        own_client,
        worker(H100, replace(H100, device="cuda:1"), replace(H100, device="cuda:1", state="loading")),
        worker(replace(V100, state="given_up")),
        worker(CPU, run="0123456789abcdef"),
        worker(role="writer"),
    )
    assert sorted(one.device for one in registered_devices(own_client)) == ["cuda:0", "cuda:1"]


def test_a_report_of_an_older_embq_still_counts_and_as_fp32(own_client: redis.Redis) -> None:
    report = json.loads(wire.write(worker(H100)))
    assert wire.read(Service, json.dumps(report), what="report") is not None
    del report["devices"][0]["precisions"]
    service = wire.read(Service, json.dumps(report), what="report")
    assert service is not None
    assert [one.precisions for one in service.devices] == [FP32]
    register(own_client, service)
    assert choose_precision(registered_devices(own_client)).precision == "fp32"


# --- what the verbs make of it ---


@pytest.fixture
def enqueue(tmp_path: Path, own_server: EmbeddedServer) -> Callable[..., Result]:
    """`embq enqueue` of some texts into one output."""
    write_texts(tmp_path / "a.jsonl", 5)

    def call(*options: str, model: str = "stub:8") -> Result:
        arguments = [str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "out"), "-m", model, *options]
        result = CliRunner().invoke(
            verbs.enqueue, arguments, env={"EMBQ_BROKER_URL": own_server.url}, catch_exceptions=False
        )
        assert result.exit_code == 0
        return result

    return call


@pytest.mark.parametrize(("devices", "precision"), [((), "fp32"), ((H100,), "bf16"), ((H100, V100), "fp16")])
def test_a_run_is_enqueued_in_what_the_registered_devices_have_in_common(
    devices: tuple[Device, ...],
    precision: str,
    enqueue: Callable[..., Result],
    own_client: redis.Redis,
    tmp_path: Path,
) -> None:
    register(own_client, *(worker(one) for one in devices))
    assert json.loads(enqueue("--dry-run", "--json").stdout)["precision"] == precision
    assert enqueue("--dry-run").stdout.startswith(f"precision {precision}: ")
    assert enqueue().stderr.startswith(f"precision {precision}: ")
    assert load_run(tmp_path / "out").model.precision == precision


def test_enqueue_tells_what_an_old_card_costs_and_a_named_precision_leaves_it_out(
    enqueue: Callable[..., Result], own_client: redis.Redis, tmp_path: Path
) -> None:
    """One GTX 1070 put an H100 on fp32, and nothing told that this is 15 times as slow."""
    hopper, pascal = device("NVIDIA H100 80GB HBM3", AMPERE), device("NVIDIA GeForce GTX 1070", FP32)
    register(own_client, worker(hopper), worker(pascal))
    told = " ".join(enqueue("--dry-run").stdout.split())
    assert "bf16 is faster on NVIDIA H100 80GB HBM3, up to 14.8 times by data sheets, and not on NVIDIA GeForce" in told
    assert "--precision bf16 leaves out" in told
    assert not enqueue("--precision", "bf16").stderr.startswith("precision")
    assert load_run(tmp_path / "out").model.precision == "bf16"


def test_a_run_keeps_its_precision_whatever_devices_there_are_later(
    enqueue: Callable[..., Result], own_client: redis.Redis, tmp_path: Path
) -> None:
    register(own_client, worker(H100))
    assert json.loads(enqueue("--json").stdout)["precision"] == "bf16"
    before = Layout(tmp_path / "out").run_json.read_bytes()
    register(own_client, worker(V100))
    for options in ((), ("--precision", "auto"), ("--precision", "bf16")):
        again = enqueue(*options)
        assert "nothing was added" in again.stdout
        assert "precision" not in again.stderr
    assert Layout(tmp_path / "out").run_json.read_bytes() == before
    with pytest.raises(InputError, match="precision: bf16 there, fp16 asked for"):
        enqueue("--precision", "fp16")
    with pytest.raises(InputError, match=r"(?m)model: stub:8 there, stub:9 asked for$"):
        enqueue(model="stub:9")


def test_what_is_sent_again_keeps_the_precision_that_the_broker_knows_of_the_folder(own_client: redis.Redis) -> None:
    assert precision_of_upload(own_client, "/data/out") == ""
    model = ModelConfig(spec="stub:8", modalities=("text",), precision="bf16")
    announced = RunRecord(run="0" * 16, output="/data/out", model=model, units=1)
    register_run(own_client, announced)
    arriving = replace(announced, run="1" * 16, output="/data/new", model=replace(model, precision="fp16"))
    announce(
        own_client, Upload(run=arriving.run, output="/data/new", record=arriving.to_json(), files=(), priority=None)
    )
    assert precision_of_upload(own_client, "/data/out") == "bf16"
    assert precision_of_upload(own_client, "/data/new") == "fp16"
    assert precision_of_upload(own_client, "/data") == ""


# --- devices that do not compute in it ---


def config(precision: str) -> ModelConfig:
    return ModelConfig(spec="hf:./model", modalities=("text",), precision=precision)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, tuple[int, int]], torch.device]:
    """Lets torch answer for one CUDA device."""

    def of(name: str, capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        return torch.device("cuda:0")

    return of


@pytest.mark.parametrize(
    ("name", "capability", "instead"),
    [("Tesla V100", (7, 0), "fp16"), ("Tesla T4", (7, 5), "fp16"), ("GeForce GTX 1070", (6, 1), "fp32")],
)
def test_a_gpu_that_emulates_bf16_refuses_it_and_names_what_admits_it(
    name: str, capability: tuple[int, int], instead: str, card: Callable[[str, tuple[int, int]], torch.device]
) -> None:
    with pytest.raises(ModelError, match=f"{name} .compute capability {capability[0]}.{capability[1]}. .*bf16") as told:
        dtype_of(config("bf16"), card(name, capability))
    assert told.value.next_step == f"--precision {instead} when the run is made admits this device"


def test_gpus_compute_in_what_they_have(
    card: Callable[[str, tuple[int, int]], torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    assert dtype_of(config("bf16"), card("NVIDIA A100", (8, 0))) == torch.bfloat16
    assert dtype_of(config("fp16"), card("Tesla V100", (7, 0))) == torch.float16
    assert not caplog.records
    assert dtype_of(config("fp16"), card("GeForce GTX 1070", (6, 1))) == torch.float16
    (warned,) = caplog.records
    assert (warned.levelname, warned.getMessage().split()[0]) == ("WARNING", "slow_precision")


def test_a_cpu_names_the_precision_that_admits_it() -> None:
    with pytest.raises(ModelError, match="fp16") as told:
        dtype_of(config("fp16"), torch.device("cpu"))
    assert told.value.next_step == "--precision fp32 when the run is made admits this device"
