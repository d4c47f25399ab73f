"""`embq.embed` beside `embq run` and sentence-transformers' `encode`: rows per second of short texts on one device.

    python -m bench.embed [--texts 10000] [--rounds 3]

The same texts, model and precision (fp32), in turns. Of `embq run` the rate from its first unit to its last commit
counts, without start and loading; of the others, a call with the model loaded. Bars: 0.97 of `embq run`, 1.5 times
`encode`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import table, write

import embq
from bench.corpus import docstrings

BARS = {"embq run": 0.97, "sentence-transformers": 1.5}
