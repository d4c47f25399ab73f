"""Devices that are there, and the numbers in which they compute."""

from __future__ import annotations

import pytest

from embq.core.errors import ConfigError, ModelError
from embq.core.models import ModelConfig
from embq.worker.embedders.device.placement import device_of, dtype_of
from tests.support.lazy import lazy

torch = lazy("torch")


CONFIG = ModelConfig(spec="hf:./model", modalities=("text",), precision="fp32")


@pytest.mark.parametrize("name", ["gpu0", "cuda:99", ""])
def test_a_device_that_is_not_here_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_of(name)
    assert caught.value.next_step


@pytest.mark.usefixtures("bf16_cpu")
def test_a_cpu_computes_in_fp32_and_bf16_but_not_in_fp16() -> None:
    cpu = device_of("cpu")
    assert dtype_of(CONFIG, cpu) == torch.float32
    assert dtype_of(ModelConfig(spec="x", modalities=("text",), precision="bf16"), cpu) == torch.bfloat16
    with pytest.raises(ModelError, match="fp16"):
        dtype_of(ModelConfig(spec="x", modalities=("text",), precision="fp16"), cpu)
