"""Pictures as webdataset shards, then embedded: shards.py OUT.

The model is an open_clip architecture with random weights, so that nothing is downloaded. For real vectors name one
with weights, such as open_clip:ViT-B-32/laion2b_s34b_b79k.
"""

import subprocess
import sys
from pathlib import Path

from PIL import Image
from skimage import data

MODEL = "open_clip:ViT-S-32-alt?init=random"

out = Path(sys.argv[1])
for name in ("astronaut", "chelsea", "coffee", "rocket"):
    picture = Image.fromarray(getattr(data, name)())
    for number in range(5):
        folder = out / "pictures" / name
        folder.mkdir(parents=True, exist_ok=True)
        picture.crop((number * 20, number * 20, number * 20 + 200, number * 20 + 200)).save(folder / f"{number}.jpg")


def embq(*command: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "embq", *command], check=True)


(out / "shards").mkdir(exist_ok=True)
embq("shards", "convert", str(out / "pictures"), str(out / "shards/train-%06d.tar"), "--samples-per-shard", "10")
embq(
    "run",
    str(out / "shards/train-{000000..000001}.tar"),
    "-o",
    str(out / "run"),
    "-m",
    "open_clip:ViT-S-32-alt?init=random",
)
embq("verify", str(out / "run"))
