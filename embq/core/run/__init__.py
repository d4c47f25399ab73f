"""An output folder: run.json, manifest, commit log, rows and failures."""
