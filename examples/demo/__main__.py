"""The demo: real texts and photographs through producer, queue, workers and writer, an account, an index, a search.

    python -m examples.demo [--output demo-output]

Everything is done by the command `embq` itself, as a user would type it; this file only collects the input, looks
whether pretrained weights can be had, and asks three questions of the result.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from embq.core.errors import command_line
from examples.demo.collect import docstrings, photographs
from examples.demo.screenshots import screenshots

TEXTS = 2000
PHOTOGRAPHS = 96
SHARD_PHOTOGRAPHS = 24
QUESTIONS = (
    "how do I run several things at the same time?",
    "read rows from a file with comma separated values",
    "turn a date written as text into a point in time",
)
PAGES = {"search": "/?index=texts:text&q=turn+text+into+a+date", "fleet": "/fleet", "map": "/map?index=texts:text"}
"""Name of a picture -> page of `embq ui`."""
HUB = ("huggingface.co", 443)
PRETRAINED = "open_clip:ViT-B-32/laion2b_s34b_b79k"
RANDOM = "open_clip:ViT-B-32?init=random&seed=0"


def main() -> int:
    """Run the demo; gives the exit status."""
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    root: Path = parser.parse_args().output
    title("1/6  collecting: docstrings of Python's own modules and of installed packages, photographs of scikit-image")
    texts = write_texts(root / "input" / "docstrings.jsonl")
    images = write_images(root / "input")
    print(f"     {TEXTS:,} texts, {PHOTOGRAPHS} photographs ({', '.join(path.name for path in images)})")

    title("2/6  texts, with all-MiniLM-L6-v2")
    text_out, image_out = root / "texts", root / "images"
    embq("run", str(texts), "--output", str(text_out), "--model", "minilm", "--unit-size", "100")

    title("3/6  photographs, with CLIP ViT-B-32")
    model = image_model(image_out)
    if model == RANDOM:
        print("     no model hub answers: the weights are RANDOM (seed 0), so these vectors mean nothing")
    embq("run", *map(str, images), "--output", str(image_out), "--model", model, "--unit-size", "16")

    title("4/6  checking every row against the input")
    for output in (text_out, image_out):
        embq("verify", str(output))

    title("5/6  making both searchable, and asking three questions")
    for output in (text_out, image_out):
        embq("index", str(output), "--quiet")
    for question in QUESTIONS:
        print(flush=True)
        embq("search", str(text_out), question, "-k", "5")
    print("\n     ... and for a photograph that is not among them:", flush=True)
    embq("search", str(image_out), "--image", str(write_query(root / "input")), "-k", "5")
    print()
    for name, output in (("texts", text_out), ("photographs", image_out)):
        status = json.loads(embq("status", str(output), "--json", capture=True))
        total = status["rows"] + status["failures"]
        print(
            f"{name:<12} in {total:,} = rows {status['rows']:,} + failures {status['failures']:,}   {output / 'parts'}"
        )
    title("6/6  the same in a browser, and a map of the texts")
    embq("atlas", str(text_out), "--no-serve")
    for picture in screenshots(root, root / "pictures", PAGES):
        print(f"     {picture}")
    print(f"     to look at them: {command_line('ui', root, '--open')}")
    return 0


def title(text: str) -> None:
    """Start a step."""
    print(f"\n{text}", flush=True)


def embq(*arguments: str, capture: bool = False) -> str:
    """Run one embq command on this terminal; the demo ends where it fails."""
    if not capture:
        print(f"     $ {command_line(*arguments)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "embq", *arguments],
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def write_texts(path: Path) -> Path:
    """`TEXTS` docstrings as .jsonl: three of four from Python's own modules, the rest from installed packages."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        library = docstrings(1_000_000)
        packages = docstrings(len(library) + 10_000, installed=True)[len(library) :]
        chosen = [*thinned(library, TEXTS * 3 // 4), *thinned(packages, TEXTS // 4)]
        write_whole(path, "".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in chosen).encode())
    return path


def thinned(texts: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """`count` of those texts that say something, taken evenly."""
    telling = [(key, text) for key, text in texts if len(text) >= 80]
    return [telling[i * len(telling) // count] for i in range(count)]


def write_images(folder: Path) -> list[Path]:
    """Half of the photographs as webdataset shards, half as a folder."""
    made = photographs(PHOTOGRAPHS, seed=0)
    in_shards, loose = made[: PHOTOGRAPHS // 2], made[PHOTOGRAPHS // 2 :]
    shards = []
    for number, start in enumerate(range(0, len(in_shards), SHARD_PHOTOGRAPHS)):
        path = folder / f"photographs-{number:04d}.tar"
        shards.append(path)
        if not path.exists():
            write_whole(path, shard(in_shards[start : start + SHARD_PHOTOGRAPHS]))
    pictures = folder / "photographs"
    pictures.mkdir(parents=True, exist_ok=True)
    for key, data in loose:
        if not (pictures / f"{key}.jpg").exists():
            write_whole(pictures / f"{key}.jpg", data)
    return [*shards, pictures]


def write_query(folder: Path) -> Path:
    """A crop of a photograph that none of the others is."""
    path = folder / "question.jpg"
    if not path.exists():
        (_, data), *_ = photographs(1, seed=1)
        write_whole(path, data)
    return path


def shard(samples: Sequence[tuple[str, bytes]]) -> bytes:
    """A webdataset shard with an image and a caption for each sample."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for key, data in samples:
            for name, content in ((f"{key}.jpg", data), (f"{key}.txt", key.rsplit("-", 1)[0].encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that an interrupted demo leaves none half-written."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def image_model(output: Path) -> str:
    """The model of an earlier demo in the folder, else pretrained weights where the hub answers, else random ones."""
    run = output / "run.json"
    if run.exists():
        return str(json.loads(run.read_text())["model"]["spec"])
    try:
        socket.create_connection(HUB, timeout=3).close()
    except OSError:
        return RANDOM
    return PRETRAINED


if __name__ == "__main__":
    sys.exit(main())
