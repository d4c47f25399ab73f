"""A library that stands in for NVML (`pynvml`): the machines of the tests have no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    """As pynvml raises it, by whatever it was asked."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU, or a MIG instance of one.

    Attributes:
        instances: of a GPU in MIG mode, None where a place is empty; () for a GPU that is not divided.
        refused: whether NVML gives no handle of it, as of another job's GPU.
    """

    name: str = "NVIDIA H100"
    uuid: str = "GPU-aaaa"
    capability: tuple[int, int] = (9, 0)
    bytes: int = 80 * GIB
    used: int = GIB
    instances: tuple[Card | None, ...] = ()
    refused: bool = False


def fake_nvml(*cards: Card) -> ModuleType:
    """The module `pynvml` on a machine with these GPUs; what a MIG instance is not asked in reality, it refuses."""

    def handle(index: int) -> Card:
        if cards[index].refused:
            raise NVMLError
        return cards[index]

    def instance(card: Card, index: int) -> Card:
        found = card.instances[index]
        if found is None:
            raise NVMLError
        return found

    def capability(card: Card) -> tuple[int, int]:
        if card.uuid.startswith("MIG-"):
            raise NVMLError
        return card.capability

    def by_uuid(uuid: str) -> Card:
        everything = [part for card in cards for part in (card, *card.instances) if part is not None]
        found = [card for card in everything if card.uuid == uuid]
        if not found:
            raise NVMLError
        return found[0]

    def refuse(*_: Any) -> Any:
        raise NVMLError

    library = ModuleType("pynvml")
    library.__dict__.update(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda card: card.uuid,
        nvmlDeviceGetName=lambda card: card.name.encode(),
        nvmlDeviceGetCudaComputeCapability=capability,
        nvmlDeviceGetMigMode=lambda card: [int(bool(card.instances))] * 2,
        nvmlDeviceGetMaxMigDeviceCount=lambda card: len(card.instances),
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=card.used, total=card.bytes),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=93),
        nvmlDeviceGetPowerUsage=refuse,  # as in virtual machines
        nvmlDeviceGetTemperature=lambda _card, _sensor: 61,
    )
    return library
