"""Texts get the vectors of open_clip's own `encode_text`, on as few tokens as decide them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from tests.contract.test_golden_texts import TEXTS, assert_equal, one_thread  # noqa: F401
from tests.support.lazy import lazy

torch = lazy("torch")
open_clip = lazy("open_clip")
clip_tower = lazy("embq.worker.embedders.text.clip_tower")


SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "context_length": 77, "vocab_size": 49408}

TOWERS: dict[str, tuple[dict[str, Any], bool]] = {
    "clip": ({"text_cfg": SMALL}, True),
    "clip with quickgelu": ({"text_cfg": SMALL, "quick_gelu": True}, True),
    "clip without projection": ({"embed_dim": 32, "text_cfg": {**SMALL, "proj_type": "none"}}, True),
    "clip with a biased projection": ({"text_cfg": {**SMALL, "proj_bias": True}}, True),
    "clip of its own text tower": ({"text_cfg": SMALL, "custom_text": True}, True),
    "end of text by its id": ({"text_cfg": {**SMALL, "pool_type": "eos", "eos_id": 49407}, "custom_text": True}, True),
    "siglip": (
        {
            "text_cfg": {
                **SMALL,
                "context_length": 64,
                "no_causal_mask": True,
                "pool_type": "last",
                "proj_bias": True,
                "tokenizer_kwargs": {"clean": "canonicalize"},
            },
            "custom_text": True,
            "init_logit_bias": -10,
        },
        False,
    ),
    "last token": ({"text_cfg": {**SMALL, "pool_type": "last"}, "custom_text": True}, False),
    "coca": (
        {
            "text_cfg": {**SMALL, "context_length": 76, "embed_cls": True, "output_tokens": True},
            "multimodal_cfg": {"context_length": 76, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
            "custom_text": True,
        },
        False,
    ),
}
"""Kind of tower -> how open_clip builds it, and whether its texts are cut."""


def save_clip(folder: Path, **cfg: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    vision = {"image_size": 32, "patch_size": 16, "head_width": 16, "layers": 1, "width": 32}
    model_cfg = {"embed_dim": 24, "vision_cfg": vision, **cfg}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {}}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
        for weights in model.parameters():
            if weights.ndim == 2:
                torch.nn.init.normal_(weights, std=0.2)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.mark.parametrize("kind", TOWERS)
def test_texts_get_the_vectors_of_the_whole_context(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, is_cut = TOWERS[kind]
    folder = save_clip(tmp_path / "clip", **cfg)
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    # The end-of-text token inside of a text is where open_clip takes its vector from.
    texts = [*TEXTS, "a fox <end_of_text> and a dog"]
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    with torch.inference_mode():
        expected = model.encode_text(ids, normalize=True).numpy()

    widths: list[int] = []
    block = (model.text if hasattr(model, "text") else model).transformer.__class__
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda self, x, **mask: widths.append(x.shape[1]) or forward(self, x, **mask))
    embedder = load(ModelConfig(spec=f"open_clip:local-dir:{folder}", modalities=("text",), precision="fp32"), "cpu")
    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)])
    lengths = [embedder.length(row) for row in prepared]
    widths.clear()
    rows = np.concatenate([embedder.embed(prepared[at : at + 3])["text"] for at in range(0, len(texts), 3)])
    assert_equal(rows, expected)
    context = ids.shape[1]
    whole = context + (kind == "coca")
    assert widths == [max(lengths[at : at + 3]) if is_cut else whole for at in range(0, len(texts), 3)]
    assert max(lengths) == context
    assert (min(lengths) < 10) == is_cut


def test_a_tower_whose_mask_is_not_causal_is_not_cut() -> None:
    model = open_clip.create_model("ViT-S-32-alt")
    assert clip_tower.causal_tower(model) is not None
    model.attn_mask[3, 5] = 0.0
    assert clip_tower.causal_tower(model) is None
