"""A tiny open_clip model as a folder with its configuration only, and shards of captioned pictures to train it on."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.picture_files import encoded, photograph

MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
"""5 MB of weights, most of them the embeddings of tokens."""

PREPROCESS = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}


def tiny_clip(folder: Path) -> Path:
    """A folder for `local-dir:FOLDER`: no weights, so that a training begins with random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"model_cfg": MODEL, "preprocess_cfg": PREPROCESS}
    (folder / "open_clip_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def captioned_shards(folder: Path, sizes: Sequence[int]) -> Path:
    """Shards `train-000000.tar` ... of so many samples each, with captions that name their keys, and sizes.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"train-{number:06d}.tar" for number in range(len(sizes))]
    at = 0
    for name, size in zip(names, sizes, strict=True):
        with tarfile.open(folder / name, "w") as tar:
            for number in range(at, at + size):
                picture = photograph().crop((number, number, number + 64, number + 64))
                _add(tar, f"{number:06d}.jpg", encoded(picture, "JPEG"))
                _add(tar, f"{number:06d}.txt", f"picture {number}".encode())
        at += size
    (folder / "sizes.json").write_text(json.dumps(dict(zip(names, sizes, strict=True))), encoding="utf-8")
    return folder


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def hub_commit(hub: Path, commit: str, *, seed: int, weights: bool = True) -> Path:
    """A commit of `org/tiny` in a hub's cache, with random weights of a seed; it is what `main` is from now on."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    repository = hub / "models--org--tiny"
    folder = tiny_clip(repository / "snapshots" / commit)
    if weights:
        torch.manual_seed(seed)
        made = open_clip.create_model(f"local-dir:{folder}")
        save_file(
            {name: one.contiguous() for name, one in made.state_dict().items()}, folder / "open_clip_model.safetensors"
        )
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return folder
