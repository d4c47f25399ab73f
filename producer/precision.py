"""`--precision auto`: the precision of a new run, from the devices that are there when it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from core.queue.service_registry import Device, services

CHOICES = ("bf16", "fp16", "fp32")
"""Those that `auto` chooses from, best first: bf16 is as fast as fp16 and has the range of fp32. int8 is never chosen:
it is for CPUs and for some models only, and is further from fp32."""
SHOWN_DEVICES = 4
"""Kinds of devices that the reason names; further ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A precision, and one sentence that gives the reason and the option for another one."""

    precision: str
    reason: str


def choose(devices: Sequence[Device]) -> Choice:
    """The first of `CHOICES` that every device computes fast.

    A GPU that the torch of its machine has no code for is left out.
    """
    usable = [device for device in devices if device.precisions]
    if not usable:
        return Choice(
            precision=CHOICES[-1],
            reason=f"precision {CHOICES[-1]}: no usable device is registered; for GPUs with tensor cores start the "
            "workers first, or give --precision bf16",
        )
    chosen = next((one for one in CHOICES if all(one in device.precisions for device in usable)), CHOICES[-1])
    better = CHOICES[: CHOICES.index(chosen)]
    faster = next((one for one in better if any(one in device.precisions for device in usable)), "")
    if not faster:
        reason = f"the fastest on every device ({_named(usable)}); --precision chooses another one"
    else:
        able = [device for device in usable if faster in device.precisions]
        others = [device for device in usable if faster not in device.precisions]
        reason = (
            f"the fastest that all devices have in common; {faster} is faster on {_named(able)}, and not on "
            f"{_named(others)}: --precision {faster} leaves out what cannot compute in it"
        )
    return Choice(precision=chosen, reason=f"precision {chosen}: {reason}")


def registered_devices(client: redis.Redis) -> list[Device]:
    """The devices of all workers that would serve a new run: without those that were given up, each once."""
    return [
        device
        for heard in services(client)
        if heard.service.role == "worker" and not heard.service.run
        for device in {one.device: one for one in heard.service.devices if one.state != "given_up"}.values()
    ]


def _named(devices: Sequence[Device]) -> str:
    """The devices, for people: those of one name are counted."""
    kinds = Counter(device.name or device.device for device in devices)
    shown = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.most_common(SHOWN_DEVICES)]
    more = len(kinds) - len(shown)
    return ", ".join(shown) + (f" and {more} other kinds" if more else "")
