"""As much of torch as the worker process of a stub model asks for, with the cards of the file EMBQ_CARDS.

A card with "gone" is not seen any more. Importing the real torch would take each process seconds.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np

__version__ = "2.15.0+cu132"
version = SimpleNamespace(cuda="13.2", hip=None)


def _visible():
    named = {card["uuid"]: card for card in json.loads(Path(os.environ["EMBQ_CARDS"]).read_text())}
    shown = [named[uuid] for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(named)).split(",")]
    return [card for card in shown if not card.get("gone")]


def device(name):
    return name


def _properties(_number):
    (card,) = _visible()
    major, minor = card["capability"]
    return SimpleNamespace(name=card["name"], major=major, minor=minor, total_memory=80 * 2**30)


def ones(count, device):
    return np.ones(count)


cuda = SimpleNamespace(
    device_count=lambda: len(_visible()),
    get_arch_list=lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    get_device_properties=_properties,
    get_device_name=lambda number: _properties(number).name,
    is_initialized=lambda: False,
)
