"""Texts in a list, a DataFrame and a run, and searches in it, without a command line: from_python.py OUT."""

import json
import sys
import textwrap
from pathlib import Path

import numpy as np

import embq

out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
modules = (json, textwrap, np)
docs = [getattr(module, name).__doc__ for module in modules for name in dir(module)]
texts = [doc for doc in docs if doc and doc.strip()][:400]

# An array of a list, in this process; the model is loaded once for several calls.
model = embq.Model("minilm")
vectors = embq.embed(texts, model)
print(f"{vectors.shape[0]} vectors of {vectors.shape[1]} numbers")
nearest = model.similarity(model.encode("wrap long lines of text"), vectors)[0].argmax()
print("nearest to 'wrap long lines of text':", texts[nearest].splitlines()[0])
model.close()

# The same as a run, which survives whatever is killed, and knows what failed.
source = out / "texts.jsonl"
source.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
done = embq.run(source, out / "run", model="minilm").wait()
print(f"{done.rows} rows, {done.failures} failures")

rows = embq.open(out / "run")
order = np.argsort([int(row["key"]) for row in rows.rows(["key"])])
print("the run's vectors differ by", np.abs(rows.vectors(dtype=np.float32)[order] - vectors).max())  # float16 is stored
