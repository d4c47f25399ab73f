"""clip-retrieval's `index` over `embq.compat.autofaiss.build_index`: the same folders in, the same files out.

```
EMBEDDINGS/img_emb  text_emb  metadata
INDEX/image.index  image.json  text.index  text.json  metadata/
```
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from embq.compat.autofaiss import build_and_print
from embq.core.errors import Exit, InputError, UsageError, command_line
from embq.core.formats.folders import METADATA
from embq.core.run.commit_log import committed_parts
from embq.core.storage.durable import fsync_file
from embq.core.storage.new_folder import new_folder
from embq.index.collection.clip_retrieval import FOLDERS
from embq.index.collection.opening import open_collection


def build_indexes(
    embeddings_folder: str,
    index_folder: str,
    image_subfolder: str,
    text_subfolder: str,
    copy_metadata: bool,
    *,
    as_json: bool,
    quiet: bool,
    **arguments: Any,
) -> int:
    """Build `image.index` and `text.index`, and copy the metadata; returns the exit status.

    Args:
        arguments: further ones of `build_index`.

    Raises InputError if there are no embeddings, or rows do not belong together; UsageError if the metadata
    would be written over.
    """
    source, target = Path(embeddings_folder), Path(index_folder)
    folders = {"image": image_subfolder, "text": text_subfolder}
    existing = {name: source / folder for name, folder in folders.items() if (source / folder).is_dir()}
    if "://" in embeddings_folder or not existing:
        raise InputError(
            f"{embeddings_folder} holds neither {image_subfolder} nor {text_subfolder}",
            next_step="of a run in another format, or on an object store: "
            f"{command_line('index', embeddings_folder, '--output', 'FOLDER')}, then `embq index export`",
            code="no_embeddings",
        )
    if folders == FOLDERS:
        for name in existing:
            open_collection(source, output=name)  # their rows belong together
    metadata = target / METADATA
    if copy_metadata and metadata.exists():
        raise UsageError(f"{metadata} exists", next_step="name a new --index_folder, or add --copy_metadata=False")
    status: int = Exit.DONE
    for name, folder in existing.items():
        paths = {"index_path": str(target / f"{name}.index"), "index_infos_path": str(target / f"{name}.json")}
        all_arguments = {**arguments, **paths, "embeddings": str(folder)}
        status = max(status, build_and_print(all_arguments, as_json=as_json, quiet=quiet))
    if copy_metadata and (source / METADATA).is_dir():
        _copy(source, metadata)
    return status


def _copy(source: Path, metadata: Path) -> None:
    """Copy the files of metadata; of a run those that it has committed."""
    files = sorted((source / METADATA).glob("*.parquet"))
    if (source / "run.json").exists():
        names = {file.path for part in committed_parts(source) for file in part}
        files = [file for file in files if str(file.relative_to(source)) in names]
    with new_folder(metadata) as unfinished:
        for file in files:
            shutil.copyfile(file, unfinished / file.name)
            fsync_file(unfinished / file.name)
    click.echo(f"metadata   {metadata}: {len(files):,} files", err=True)
