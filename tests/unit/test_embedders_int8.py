"""Devices and models that may compute in int8 and bf16, and the refusal of others; nothing is converted here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from embq.core.errors import MissingPackageError, ModelError
from embq.core.models import FAMILIES, ModelConfig
from embq.worker.embedders.device.placement import CPU_NEEDS, dtype_of
from embq.worker.embedders.registry import load
from embq.worker.embedders.text import int8
from tests.support.lazy import lazy

torch = lazy("torch")


def config_of(spec: str, precision: str = "int8", modality: str = "text") -> ModelConfig:
    return ModelConfig(spec=spec, modalities=(modality,), precision=precision)


def flags(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    monkeypatch.setattr("embq.worker.embedders.device.placement.cpu_flags", lambda: frozenset(found))


@pytest.mark.parametrize("precision", sorted(CPU_NEEDS))
def test_a_cpu_computes_in_a_short_type_only_where_it_has_instructions_for_it(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("minilm", precision)
    for flag in CPU_NEEDS[precision]:
        flags(monkeypatch, "avx2", flag)
        dtype_of(config, torch.device("cpu"))
    flags(monkeypatch, "avx2", "avx512f")
    with pytest.raises(ModelError, match=f"does not compute in {precision}") as caught:
        load(config, "cpu")
    assert caught.value.next_step == "--precision fp32 when the run is made admits this device"


def test_the_instructions_of_a_cpu_are_not_asked_for_where_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    flags(monkeypatch)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert dtype_of(config_of("minilm", "bf16"), torch.device("cuda")) == torch.bfloat16
    assert dtype_of(config_of("minilm", "fp32"), torch.device("cpu")) == torch.float32


def test_int8_is_for_cpus_and_for_models_of_texts() -> None:
    with pytest.raises(ModelError, match="only a CPU computes in int8"):
        dtype_of(config_of("minilm"), torch.device("cuda"))
    assert [name for name, family in FAMILIES.items() if not family.int8] == ["open_clip"]
    with pytest.raises(ModelError, match="open_clip models are not computed in int8"):
        load(config_of("open_clip:ViT-B-32?init=random"), "cpu")


@pytest.mark.parametrize("package", ["openvino", "nncf"])
def test_without_the_runtime_its_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags(monkeypatch, "avx512_vnni")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=package) as caught:
        load(config_of("minilm"), "cpu")
    assert caught.value.next_step == "pip install 'embq[int8]'"


@pytest.mark.parametrize("broken", [float("nan"), -1.0])
def test_a_trunk_that_was_converted_wrongly_is_refused(broken: float) -> None:
    batch = {"input_ids": torch.ones((2, 3), dtype=torch.int64), "attention_mask": torch.ones((2, 3))}
    states = torch.ones((2, 3, 4))

    def exact(**_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=states)

    def wrong(**_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.cat([states[:1], broken * states[1:]]))

    int8.check_cosines(exact, exact, [batch, batch], "st:x")
    with pytest.raises(ModelError, match="st:x: in int8 its vectors are too far from those in fp32"):
        int8.check_cosines(exact, wrong, [batch, batch], "st:x")


def test_a_trunk_in_int8_gives_nothing_but_its_last_hidden_states() -> None:
    compiled = SimpleNamespace(create_infer_request=lambda: None)
    trunk = int8.Int8Trunk(compiled, config=None, takes=("input_ids", "attention_mask"))
    ids = torch.ones((1, 2), dtype=torch.int64)
    with pytest.raises(ModelError, match="not with output_hidden_states"):
        trunk(input_ids=ids, attention_mask=ids, output_hidden_states=True)


def test_a_trunk_that_cannot_be_converted_is_refused_with_its_reason() -> None:
    if find_spec("nncf") is None:
        pytest.skip("no runtime")

    class Trunk(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, return_dict: bool) -> None:
            raise ValueError("no pages left")

    batch = {name: torch.ones((2, 3), dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    tokens = SimpleNamespace(
        rows=lambda texts: [{"input_ids": batch["input_ids"][0]} for _ in texts], padded=lambda rows, device: batch
    )
    with pytest.raises(ModelError, match="st:x: its trunk cannot be converted to int8: ValueError: no pages left"):
        int8.int8_trunk(Trunk(), tokens, "", "st:x")
