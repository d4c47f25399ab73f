"""`embq doctor` says what works on this machine, and how to mend what does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

import embq.app.doctor.machine_checks
import embq.core.broker.embedded
from embq.app.cli.entry_point import run
from embq.app.doctor import probes
from embq.app.doctor.check import Check
from embq.app.doctor.machine_checks import broker, machine, packages, storage
from embq.app.doctor.probes import devices, models
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, DeviceError, Exit, UnwellError
from embq.core.settings import Settings
from tests.support.fakes.nvml import Card, fake_nvml

GIB = 1024**3
Usage = namedtuple("Usage", "total used free")


def states(checks: Iterator[Check]) -> dict[str, str]:
    """Name -> state."""
    return {check.name: check.state for check in checks}


# --- packages ---


def test_the_packages_of_this_environment_are_ok() -> None:
    assert states(packages()) == {"python": "ok", "packages": "ok"}


def test_the_broken_torch_release_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu126" if name == "torch" else real(name))

    check = list(packages())[1]

    assert (check.state, check.fix) == ("fail", "pip install 'torch!=2.13.0'")


def test_a_laptop_without_numpy_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("numpy", "torch"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)

    assert states(packages())["packages"] == "warn"


# --- broker ---


def test_a_good_broker_is_ok_with_its_queue_and_clock(own_server: EmbeddedServer) -> None:
    assert states(broker(Settings(broker_url=own_server.url))) == {
        "broker": "ok",
        "queue": "ok",
        "clock": "ok",
        "memory": "ok",
    }


def test_without_a_configured_broker_the_embedded_server_is_started_and_stopped() -> None:
    checks = list(broker(Settings()))

    assert [check.state for check in checks] == ["ok", "ok", "ok"]
    assert "the embedded server starts" in checks[0].detail


def test_without_any_broker_to_start_there_is_a_warning_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise ConfigError("none can be started here", next_step="pip install 'embq[embedded]'")

    monkeypatch.setattr("embq.app.doctor.broker_checks.server_binary", none)

    assert list(broker(Settings())) == [
        Check("broker", "warn", "none can be started here", "pip install 'embq[embedded]'")
    ]


def test_an_embedded_server_that_does_not_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embq.core.broker.embedded, "server_binary", lambda: Path("/bin/false"))

    (check,) = broker(Settings())

    assert check.state == "fail"
    assert "stopped at once" in check.detail


def test_a_broker_that_does_not_answer_fails_without_showing_the_password() -> None:
    (check,) = broker(Settings(broker_url="redis://:hunter2@127.0.0.1:1"))

    assert check.state == "fail"
    assert "no broker answers" in check.detail
    assert "hunter2" not in check.detail + check.fix


def test_a_url_of_another_scheme_fails() -> None:
    (check,) = broker(Settings(broker_url="http://localhost"))

    assert (check.name, check.state) == ("broker", "fail")


def test_a_broker_that_would_lose_or_evict_work_fails_with_each_reason(own_server: EmbeddedServer) -> None:
    with connect(own_server.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")

    failed = [check for check in broker(Settings(broker_url=own_server.url)) if check.state == "fail"]

    assert ["maxmemory-policy" in failed[0].detail, "append-only" in failed[1].detail] == [True, True]
    assert all(check.fix for check in failed)


def test_a_user_who_may_not_read_queues_fails(own_server: EmbeddedServer) -> None:
    with connect(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "small", "on", ">pw", "+info", "+ping", "+client", "+time", "~*")
    url = own_server.url.replace("unix://:", "unix://small:").replace(own_server._password, "pw")

    checks = list(broker(Settings(broker_url=url)))

    assert [(check.name, check.state) for check in checks] == [("broker", "fail")]
    assert "refuses" in checks[0].detail


def test_a_clock_that_is_far_from_the_brokers_is_a_warning(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis.Redis, "time", lambda self: (1, 0))

    assert states(broker(Settings(broker_url=own_server.url)))["clock"] == "warn"


# --- devices and models ---


CARDS = (Card(name="NVIDIA H200", uuid="GPU-1"), Card(name="NVIDIA GeForce GTX 1070", uuid="GPU-2"))


def test_each_gpu_is_tried_alone_and_one_that_does_not_compute_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*CARDS))

    def child(*_arguments: str, timeout_s: float, **shown: str) -> dict[str, Any]:
        if shown == {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}:
            return {"torch": "2.9", "bytes": 140 * GIB}
        raise DeviceError("it has compute capability 6.1", next_step="install another torch")

    monkeypatch.setattr(probes, "child", child)
    first, second = devices(None)

    assert (first.name, first.state) == ("cuda:0", "ok")
    assert "NVIDIA H200, 150.3 GB" in first.detail
    assert (second.name, second.state) == ("cuda:1", "fail")
    assert second.detail == "NVIDIA GeForce GTX 1070: it has compute capability 6.1"
    assert second.fix == "install another torch"


def test_the_probe_of_a_gpu_says_what_keeps_torch_from_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the program itself, with a torch that has no code for the second card and loses the third."""
    cards = [("NVIDIA H100", 9, 0, {}), ("NVIDIA GeForce GTX 1070", 6, 1, {}), ("NVIDIA L4", 8, 9, {"gone": True})]
    told = [
        {"name": name, "uuid": f"GPU-{number}", "capability": [major, minor], **more}
        for number, (name, major, minor, more) in enumerate(cards)
    ]
    (tmp_path / "cards").write_text(json.dumps(told))
    monkeypatch.setenv("EMBQ_CARDS", str(tmp_path / "cards"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "faults" / "kit" / "cards"))
    here = [Card(name=card["name"], uuid=card["uuid"]) for card in told]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*here))

    good, old, gone = devices(None)

    assert (good.state, old.state, gone.state) == ("ok", "fail", "fail")
    assert "compute capability 6.1" in old.detail
    assert "whl/cu126" in old.fix
    assert "does not see the device" in gone.detail
    assert "nvidia-smi" in gone.fix


def test_a_torch_that_crashes_fails_and_a_missing_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(probes, "child", partial(probes.child, "-c", "import os; os.abort()"))
        (check,) = devices(None)
    assert (check.state, check.detail) == ("fail", "torch cannot be used: the process ended with status -6")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (check,) = devices(None)
    assert (check.state, check.fix) == ("warn", "pip install 'embq[worker]'")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "status -11"),
        ("raise SystemError('driver too old')", "driver too old"),
        ("pass", "status 0"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_child_that_dies_or_hangs_becomes_an_error(code: str, said: str) -> None:
    with pytest.raises(UnwellError, match=said):
        probes.child("-c", code, timeout_s=1 if "sleep" in code else 30)


def test_the_families_that_can_be_loaded_are_named_without_importing_them() -> None:
    code = "import sys; from embq.app.doctor.probes import models; print(list(models())); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    checks, imported = done.stdout.splitlines()
    assert "usable here: minilm, st, hf, open_clip, stub" in checks
    assert imported == "False"


def test_a_missing_family_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "open_clip" else real(name))

    (check,) = models()

    assert check.state == "warn"
    assert "usable here: minilm, st, hf, stub; not installed: open_clip" in check.detail


def test_a_model_embeds_one_sample_and_says_its_dimension() -> None:
    check = list(models("stub:12"))[-1]

    assert (check.name, check.state) == ("model", "ok")
    assert "dimensions: text 12" in check.detail


@pytest.mark.parametrize("modality", ["image", pytest.param("text", marks=pytest.mark.slow)])
def test_a_model_of_transformers_embeds_what_its_configuration_says(
    tmp_path: Path, modality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from embq.app.doctor import probe_process
    from tests.support.models.text import save_trunk
    from tests.support.models.vision import save_vision

    if modality == "image":
        save_vision(tmp_path / "model", "siglip")
    else:
        save_trunk(tmp_path / "model", "bert")
    # In this process, which has imported transformers: the processes of other probes are like that of this one.
    monkeypatch.setattr(probes, "child", lambda *arguments, timeout_s: probe_process.model(arguments[-1]))
    check = list(models(f"hf:{tmp_path / 'model'}"))[-1]

    assert f"dimensions: {modality} 32" in check.detail


@pytest.mark.parametrize(
    "spec", ["nonsense", "stub:0", "stub:8?nope=1", pytest.param("hf:./nothing", marks=pytest.mark.slow)]
)
def test_a_model_that_cannot_be_had_fails_with_its_next_step(spec: str) -> None:
    check = list(models(spec))[-1]

    assert (check.name, check.state) == ("model", "fail")
    assert check.fix


# --- storage and machine ---


def test_storage_is_tried_in_the_output_folder_and_left_clean(tmp_path: Path) -> None:
    (check,) = storage(str(tmp_path))

    assert check.state in ("ok", "warn")
    assert str(tmp_path) in check.detail
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    (check,) = storage(str(tmp_path / "a" / "b"))

    assert check.state in ("ok", "warn")
    assert not (tmp_path / "a").exists()


def test_an_output_that_is_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    (check,) = storage(str(tmp_path / "file"))

    assert check.state == "fail"
    assert check.fix


def test_storage_without_hard_links_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    (check,) = storage(str(tmp_path))

    assert check.state == "fail"
    assert "hard links" in check.fix


def test_storage_that_lets_a_name_be_created_twice_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", os.replace)

    (check,) = storage(str(tmp_path))

    assert (check.state, "twice" in check.detail) == ("fail", True)


def test_a_nearly_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(GIB, 0, GIB))

    assert states(storage(str(tmp_path))) == {"storage": "warn"}


def test_small_limits_of_the_machine_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1024**2, 0, 0))
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))

    found = {check.name: check for check in machine()}

    assert found["machine"].state == "ok"
    assert (found["open files"].state, found["open files"].fix) == ("warn", "ulimit -n 4096")
    assert found["shm"].state == "warn"


# --- the verb ---


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The rows that the verb will be given; add to them."""
    found: list[Check] = []
    monkeypatch.setattr(
        embq.app.doctor.machine_checks, "check_machine", lambda settings, *, output, model_specs: iter(found)
    )
    return found


def test_the_verb_prints_a_row_for_each_check_and_the_fix_below(
    rows: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    rows += [Check("python", "ok", "3.11"), Check("shm", "warn", "small", "larger")]

    assert run(["doctor"]) == Exit.DONE

    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["ok", "python", "3.11"], ["warn", "shm", "small"], ["fix:", "larger"]]


def test_a_failed_check_gives_status_69_and_ok_false(rows: list[Check], capsys: pytest.CaptureFixture[str]) -> None:
    rows += [Check("broker", "fail", "away", "start it")]

    assert run(["doctor", "--json"]) == Exit.UNAVAILABLE

    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "ok": False,
        "checks": [{"name": "broker", "state": "fail", "detail": "away", "fix": "start it"}],
    }


def test_doctor_looks_at_everything_and_passes_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--output", str(tmp_path), "--model", "stub:8", "--json"]) == Exit.DONE

    report = json.loads(capsys.readouterr().out)
    torch = [check for check in report["checks"] if check["name"] == "devices" or check["name"].startswith("cuda:")]
    assert all(check["state"] in ("ok", "warn") for check in torch)
    assert importlib.metadata.version("torch").partition("+")[0] in torch[0]["detail"], "from a process of its own"
    names = [check["name"] for check in report["checks"]]
    assert {"python", "packages", "broker", "queue", "clock", "models", "model", "storage", "machine"} <= set(names)
