"""Deletes what embq does not use of pyarrow, numpy and h5py: 80 MB of an image that has 400 beside Python.

Flight and pyarrow's own client for S3 are libraries that nothing of embq imports (object stores are read and written
through fsspec); PyPI has no pyarrow without them. The rest is tests and headers.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

UNUSED = {
    "pyarrow": (
        "libarrow_flight*",
        "libarrow_python_flight*",
        "_flight*",
        "libarrow_s3*",
        "_s3fs*",
        "tests",
        "include",
    ),
    "numpy": ("**/tests",),
    "h5py": ("tests",),
}

for name, patterns in UNUSED.items():
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        continue
    for pattern in patterns:
        for path in list(Path(spec.origin).parent.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
