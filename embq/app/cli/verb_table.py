"""The verbs of `embq`, where each of them is, and how the list of them is cut.

This is the one place where the command line names the modules of satellites; `embq.core.queue.other_work` is the
workers' own.
"""

from __future__ import annotations

VERBS = {
    "run": ("embq.app.verbs.run:run", "Embed inputs on this machine, from start to finish."),
    "enqueue": ("embq.app.verbs.run:enqueue", "Plan a run and hand it to resident workers."),
    "pause": ("embq.app.verbs.run_control:pause", "Pause a run."),
    "resume": ("embq.app.verbs.run_control:resume", "Continue an interrupted, paused or cancelled run."),
    "cancel": ("embq.app.verbs.run_control:cancel", "Cancel a run; committed rows stay."),
    "search": ("embq.retrieval.verbs.search", "Search an index by a text, an image or a vector."),
    "status": ("embq.app.verbs.status", "Show the progress of a run, or of all that a broker knows."),
    "logs": ("embq.app.verbs.status:logs", "Print the service logs of a run."),
    "verify": ("embq.app.verbs.output_folder:verify", "Re-read inputs and outputs, and check every invariant."),
    "export": ("embq.app.verbs.export", "Write committed rows as files for other tools."),
    "index": ("embq.index.verbs", "Build a search index with a given recall; add to it, delete, export."),
    "ui": ("embq.retrieval.verbs.serve:ui", "Show search, fleet and map as web pages."),
    "atlas": ("embq.retrieval.verbs.serve:atlas", "Show an index as a map."),
    "serve": ("embq.retrieval.verbs.serve", "Answer searches over HTTP, like clip-retrieval's back end."),
    "failures": ("embq.app.verbs.status:failures", "List samples without an embedding, grouped by cause."),
    "retry": ("embq.app.verbs.run_control:retry", "Retry failed samples after the cause is fixed."),
    "gc": ("embq.app.verbs.output_folder:gc", "Delete orphaned files and finished runs' Redis keys."),
    "doctor": ("embq.app.verbs.installation:doctor", "Check broker, devices, models and storage of this machine."),
    "config": ("embq.app.verbs.installation:config", "Show every setting and where it comes from."),
    "completion": ("embq.app.cli.completion", "Print a completion script for bash, zsh or fish."),
    "health": ("embq.app.verbs.services:health", "Query the health of a service on this machine."),
    "bench": ("embq.lab.verbs", "Measure workers, devices, units and images on this machine."),
    "shards": ("embq.training.verbs.shards", "Make, count, check and serve webdataset shards."),
    "train": ("embq.training.verbs.train", "Train models on shards, to embed with them after."),
    "clip-retrieval": ("embq.compat.clip_retrieval", "Run published commands of clip-retrieval."),
    "autofaiss": ("embq.compat.autofaiss", "Run published commands of autofaiss."),
    "broker": ("embq.app.verbs.broker", "Make users, passwords and certificates for a broker."),
    "fleet": ("embq.fleet.verbs", "Start, show, drain and end workers on many machines."),
    "producer": ("embq.app.verbs.services:producer", "Run the resident feeder."),
    "worker": ("embq.app.verbs.services:worker", "Run one worker process per device."),
    "writer": ("embq.app.verbs.services:writer", "Run the single writer."),
}
"""Verb -> the module whose `command` it is, or module:name, and its line of help: the list imports no verb."""

GROUPS = {
    "Daily": ("run", "status", "search", "index", "ui"),
    "Runs": ("enqueue", "pause", "resume", "cancel", "logs", "failures", "retry", "verify", "export", "gc"),
    "Index": ("serve", "atlas"),
    "Fleet": ("producer", "worker", "writer", "fleet", "broker", "health"),
    "More": ("doctor", "config", "bench", "shards", "train", "clip-retrieval", "autofaiss", "completion"),
}
"""Heading of `embq --help` -> the verbs below it."""

BENCH_VERBS = {
    "mmoclip": ("embq.training.verbs.mmoclip", "The MMoCLIP benchmark: ViT-L-14 on 3.2 million made-up pairs."),
}
"""Verbs of `embq bench` beside its own, as `VERBS`."""

UNLISTED = {
    "inference": "embq.compat.clip_retrieval:inference",
    "build_index": "embq.compat.autofaiss:build_index_command",
}
"""Verbs that only clip-retrieval and autofaiss have -> where they are."""

FOREIGN_VERBS = {
    verb: [ours]
    for ours, verbs in (
        ("embq run", ("end2end", "embed", "encode", "start")),
        ("embq status", ("list", "ls", "ps")),
        ("embq search", ("filter", "query")),
        ("embq index", ("build",)),
        ("embq cancel", ("stop",)),
        ("embq serve", ("back",)),
    )
    for verb in verbs
}
"""Those without a translation -> ours, as suggestions."""
