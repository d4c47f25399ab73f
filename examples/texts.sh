#!/usr/bin/env bash
# Embed lines of text, verify the rows, build an index and search it: texts.sh OUT
set -euo pipefail
out=${1:?folder for the example}
mkdir -p "$out"

cat > "$out/notes.jsonl" <<'LINES'
{"id": "bike", "text": "A red bicycle leans against a brick wall."}
{"id": "soup", "text": "Simmer the tomatoes with basil for twenty minutes."}
{"id": "star", "text": "The telescope shows the moons of Jupiter."}
{"id": "lock", "text": "A lease that is not renewed goes to another worker."}
LINES

embq run "$out/notes.jsonl" -o "$out/run" -m minilm
embq verify "$out/run"
embq index "$out/run"
embq search "$out/run" "planets seen from a garden" -k 2
