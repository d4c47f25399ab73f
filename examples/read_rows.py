"""Read the rows of a finished run: read_rows.py OUT, where `embq run ... -o OUT` was run before.

The commit log names the files that count. Any tool that reads parquet can do the same.
"""

# pyright: basic
# pyarrow has no types.

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds

out = Path(sys.argv[1])
records = [json.loads(path.read_text()) for path in sorted((out / "commits").glob("*.json"))]
files = [str(out / file["path"]) for record in records for file in record["files"] if file["kind"] == "rows"]
table = ds.dataset(files).to_table(columns=["id", "key", "caption", "embedding"]).sort_by("id")
vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1).astype(np.float32)

print(f"{table.num_rows} rows of {vectors.shape[1]} numbers")
nearest = np.argsort(vectors @ vectors[0])[::-1][:3]
print("nearest to", repr(table["key"][0].as_py()), "are", [table["key"][int(row)].as_py() for row in nearest])
