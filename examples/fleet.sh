#!/usr/bin/env bash
# The services of a fleet, all on this machine: fleet.sh OUT, with the address of a Redis or Valkey server in EMBQ_BROKER_URL.
# On real machines each command runs where its comment says; OUT is a folder that the machines share.
set -euo pipefail
out=$(realpath -m "${1:?folder for the example}")
: "${EMBQ_BROKER_URL:?address of the broker, such as redis://127.0.0.1:6379}"
mkdir -p "$out"
for n in {1..200}; do echo "{\"text\": \"This is note number $n.\"}"; done > "$out/notes.jsonl"

# Resident services: they wait for runs, and end at SIGTERM after the units that have begun.
embq producer & services=($!)                     # on one machine
embq writer & services+=($!)                      # on one machine, which writes OUT
embq worker --devices cpu & services+=($!)        # on every machine: one process per GPU, here one for the CPU
embq worker --devices cpu & services+=($!)        # another machine; it may join and leave at any time
trap 'kill "${services[@]}"; wait' EXIT

# From a laptop: hand over a run, and watch it.
embq enqueue "$out/notes.jsonl" -o "$out/run" -m minilm --unit-size 20
embq status "$out/run" --watch
embq verify "$out/run"
