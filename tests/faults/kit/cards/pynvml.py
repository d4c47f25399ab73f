"""NVML of a machine with the cards of the file EMBQ_CARDS, for a process with this folder on PYTHONPATH."""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4]))

from tests.support.fakes.nvml import Card, fake_nvml

globals().update(
    fake_nvml(
        *(
            Card(name=card["name"], uuid=card["uuid"], capability=tuple(card["capability"]))
            for card in json.loads(Path(os.environ["EMBQ_CARDS"]).read_text())
        )
    ).__dict__
)
