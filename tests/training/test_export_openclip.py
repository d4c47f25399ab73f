"""`embq train export`: the folder gives the trained model back, whatever flags its training had."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embq.core.errors import EmbqError, InputError, ModelError, OutputError, UsageError
from embq.core.models import ModelConfig
from embq.training.export.openclip import CONFIG, PROVENANCE, WEIGHTS, export_openclip
from embq.training.openclip.checkpoints import open_checkpoint
from tests.support.models.clip import hub_commit, tiny_clip
from tests.support.models.text import word_pieces


def trained(folder: Path, *flags: str, model: str = "", seed: int = 0, epochs: Sequence[int] = (1,)) -> Any:
    """A training's folder as open_clip leaves it, and its model: weights as after some steps, all of them changed."""
    import open_clip
    from open_clip_train.params import parse_args

    model = model or f"local-dir:{tiny_clip(folder.parent / 'plain')}"
    args = parse_args(["--model", model, "--name", folder.name, *flags])
    size = args.force_image_size
    args.force_image_size = size[0] if isinstance(size, list) and len(size) == 1 else size
    torch.manual_seed(seed)
    made, _, _ = open_clip.create_model_and_transforms(
        args.model,
        args.pretrained,
        force_quick_gelu=args.force_quick_gelu,
        force_custom_text=args.force_custom_text,
        force_patch_dropout=args.force_patch_dropout,
        force_image_size=args.force_image_size,
        force_context_length=args.force_context_length,
        image_mean=args.image_mean,
        image_std=args.image_std,
        image_interpolation=args.image_interpolation,
        image_resize_mode=args.image_resize_mode,
        **({"init_logit_scale": 2.302585092994046, "init_logit_bias": -10} if args.siglip else {}),
    )
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "params.txt").write_text("".join(f"{name}: {value}\n" for name, value in sorted(vars(args).items())))
    for epoch in epochs:
        with torch.no_grad():
            for weights in made.parameters():
                weights.add_(torch.randn(weights.shape) * 0.05)
        state = {f"module.{name}": one for name, one in made.state_dict().items()}  # as several processes save it
        torch.save({"epoch": epoch, "name": "t", "state_dict": state}, folder / "checkpoints" / f"epoch_{epoch}.pt")
    return made.eval()


def vectors(model: Any, size: int, context: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(4, 3, size, size, generator=generator)
    texts = torch.randint(1, 40_000, (4, context), generator=generator)
    with torch.inference_mode():
        return [model.encode_image(images), model.encode_text(texts)]


NETWORK = ["--force-quick-gelu", "--force-custom-text", "--force-patch-dropout", "0.5"]
SIZES = ["--force-image-size", "48", "--force-context-length", "32"]
SCALING = ["--image-mean", "0.5", "0.4", "0.3", "--image-std", "0.2", "0.2", "0.2"]
GEOMETRY = ["--image-interpolation", "bilinear", "--image-resize-mode", "squash"]
FLAGS = [
    [],
    [*NETWORK, *SIZES],
    ["--siglip", *SCALING, *GEOMETRY, "--precision", "amp", "--lr", "1e-3"],
    *(
        pytest.param(flags, marks=pytest.mark.slow)
        for flags in (NETWORK[:1], NETWORK[1:2], NETWORK[2:], SIZES[:2], SIZES[2:], ["--siglip"], SCALING, GEOMETRY)
    ),
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags)[:24] or "no flags")
def test_the_exported_model_is_the_trained_one_bit_for_bit(tmp_path: Path, flags: list[str]) -> None:
    import open_clip

    before = trained(tmp_path / "run", *flags)
    export_openclip(tmp_path / "run", tmp_path / "model")
    after = open_clip.create_model(f"local-dir:{tmp_path / 'model'}", require_pretrained=True).eval()
    size = 48 if "--force-image-size" in flags else 32
    context = 32 if "--force-context-length" in flags else 77
    prepared = [json.dumps(model.visual.preprocess_cfg) for model in (before, after)]
    assert prepared[0] == prepared[1]
    for one, other in zip(vectors(before, size, context), vectors(after, size, context), strict=True):
        assert torch.equal(one, other)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted([CONFIG, PROVENANCE, WEIGHTS])


def test_a_model_of_open_clips_own_list_is_exported_with_what_its_name_stands_for(tmp_path: Path) -> None:
    import open_clip

    described = json.loads((tiny_clip(tmp_path / "plain") / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "tiny-vit-quickgelu.json").write_text(json.dumps({**described, "quick_gelu": True}))
    open_clip.add_model_config(tmp_path / "tiny-vit-quickgelu.json")
    before = trained(tmp_path / "run", model="tiny-vit-quickgelu")
    export_openclip(tmp_path / "run", tmp_path / "model")
    assert json.loads((tmp_path / "model" / CONFIG).read_text())["model_cfg"]["quick_gelu"] is True
    after = open_clip.create_model(f"local-dir:{tmp_path / 'model'}").eval()
    assert list(after.visual.preprocess_cfg["mean"]) == list(before.visual.preprocess_cfg["mean"])
    assert all(torch.equal(*pair) for pair in zip(vectors(before, 32, 77), vectors(after, 32, 77), strict=True))


def test_the_tokenizer_of_a_model_goes_along(tmp_path: Path) -> None:
    import open_clip

    plain = tiny_clip(tmp_path / "plain")
    described = json.loads((plain / CONFIG).read_text())
    described["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "someone/theirs", "context_length": 20}
    (plain / CONFIG).write_text(json.dumps(described))
    word_pieces().save_pretrained(plain)
    trained(tmp_path / "run", model=f"local-dir:{plain}")
    export_openclip(tmp_path / "run", tmp_path / "model")
    text = ["the quick brown fox"]
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'model'}")(text)
    assert torch.equal(tokens, open_clip.get_tokenizer(f"local-dir:{plain}")(text))

    for path in plain.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="its tokeniser"):
        export_openclip(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_training_from_the_hub_is_exported_by_the_commit_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository has changed by then, and its weights need not be here."""
    made = trained(tmp_path / "run")
    params = tmp_path / "run" / "params.txt"
    name = f"hf-hub:org/tiny@{'a' * 40}"
    lines = [f"model: {name}" if line.startswith("model: ") else line for line in params.read_text().splitlines()]
    params.write_text("\n".join(lines))
    hub_commit(tmp_path / "hub", "a" * 40, seed=0, weights=False)
    (hub_commit(tmp_path / "hub", "b" * 40, seed=0, weights=False) / CONFIG).write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    exported = export_openclip(tmp_path / "run", tmp_path / "model")
    assert exported.provenance["training"]["model"] == name
    assert str(tmp_path / "hub") not in (tmp_path / "model" / PROVENANCE).read_text()
    found = load_file(tmp_path / "model" / WEIGHTS)
    assert all(torch.equal(one, found[key]) for key, one in made.state_dict().items())


def test_the_latest_epoch_of_a_training_is_taken(tmp_path: Path) -> None:
    trained(tmp_path / "run", epochs=(2, 9, 10))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert open_checkpoint(tmp_path / "run").path == checkpoints / "epoch_10.pt"
    assert open_checkpoint(checkpoints).epoch == 10
    assert open_checkpoint(checkpoints / "epoch_9.pt").epoch == 9
    content = torch.load(checkpoints / "epoch_9.pt")
    torch.save({**content, "epoch": 10}, checkpoints / "epoch_latest.pt")
    assert open_checkpoint(tmp_path / "run").path == checkpoints / "epoch_10.pt"
    torch.save({**content, "epoch": 11}, checkpoints / "epoch_latest.pt")
    assert open_checkpoint(tmp_path / "run").path == checkpoints / "epoch_latest.pt"


def test_each_checkpoint_has_its_own_fingerprint_which_a_worker_finds_too(tmp_path: Path) -> None:
    from embq.worker.embedders.registry import load

    trained(tmp_path / "run", epochs=(1, 2))
    latest = export_openclip(tmp_path / "run", tmp_path / "a")
    again = export_openclip(tmp_path / "run" / "checkpoints" / "epoch_2.pt", tmp_path / "b")
    earlier = export_openclip(tmp_path / "run" / "checkpoints" / "epoch_1.pt", tmp_path / "c")
    assert latest.provenance["checkpoint"]["epoch"] == 2
    assert latest.fingerprint == again.fingerprint != earlier.fingerprint
    for name in (CONFIG, WEIGHTS, PROVENANCE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    config = ModelConfig(spec=latest.spec, modalities=("image",), precision="fp32", decode="cpu-exact")
    assert load(config, "cpu").fingerprint == latest.fingerprint


def test_a_worker_takes_no_folder_without_weights(tmp_path: Path) -> None:
    from embq.worker.embedders.registry import load

    folder = tiny_clip(tmp_path / "model")
    config = ModelConfig(spec=f"open_clip:local-dir:{folder}", modalities=("image",), precision="fp32")
    with pytest.raises(ModelError, match="holds no weights"):
        load(config, "cpu")
    (folder / "epoch_1.pt").write_bytes(b"weights under a name that open_clip does not look for")
    with pytest.raises(ModelError, match="holds no weights"):
        load(config, "cpu")


def refusal(kind: type[EmbqError], *arguments: Any, **options: Any) -> EmbqError:
    with pytest.raises(kind) as caught:
        export_openclip(*arguments, **options)
    assert caught.value.next_step
    return caught.value


def test_what_is_no_checkpoint_is_told_with_what_to_do(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    file, out = tmp_path / "run" / "checkpoints" / "epoch_1.pt", tmp_path / "model"
    assert "no such file" in refusal(InputError, tmp_path / "nowhere", out).message
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refusal(InputError, tmp_path / "empty", out).message
    cut = tmp_path / "run" / "checkpoints" / "epoch_2.pt"
    cut.write_bytes(file.read_bytes()[:100_000])
    assert "no whole checkpoint" in refusal(InputError, tmp_path / "run", out).message

    class Ran:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"epoch": 3, "state_dict": {"a": torch.ones(1)}, "more": Ran()}, cut)
    assert "runs no code" in refusal(InputError, cut, out).message
    assert not (tmp_path / "ran").exists()
    torch.save({"epoch": 3, "state_dict": {}}, cut)
    assert "holds no weights" in refusal(InputError, cut, out).message
    assert not out.exists()
    assert not list(tmp_path.glob(".model*"))


def test_weights_and_arguments_that_do_not_fit_are_told(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    params, out = tmp_path / "run" / "params.txt", tmp_path / "model"
    kept = params.read_text()
    params.write_text(kept.replace("force_image_size: None", "force_image_size: 48"))
    assert "positional_embedding" in refusal(ModelError, tmp_path / "run", out).message
    params.write_text(kept.replace("use_bnb_linear: None", "use_bnb_linear: SwitchBackLinearGlobal"))
    assert "bitsandbytes" in refusal(ModelError, tmp_path / "run", out).message
    params.unlink()
    assert "--model" in refusal(UsageError, tmp_path / "run", out).next_step
    assert "no architecture" in refusal(ModelError, tmp_path / "run", out, model="ViT-B-33").message
    assert export_openclip(tmp_path / "run", out, model=str(tmp_path / "plain")).provenance["samples_seen"] is None
    params.write_text(kept.replace(str(tmp_path / "plain"), str(tmp_path / "gone")))
    assert "--model FOLDER" in refusal(ModelError, tmp_path / "run", tmp_path / "other").next_step

    params.write_text(kept)
    file = tmp_path / "run" / "checkpoints" / "epoch_1.pt"
    content = torch.load(file)
    content["state_dict"]["module.logit_scale"].fill_(float("nan"))
    torch.save(content, file)
    assert "diverged" in refusal(ModelError, tmp_path / "run", tmp_path / "other").message


def test_a_disk_that_is_full_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*_: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    trained(tmp_path / "run")
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    refused = refusal(OutputError, tmp_path / "run", tmp_path / "model")
    assert (refused.code, refused.message) == ("no_space", f"no space left for {tmp_path / 'model'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "run"]


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    (tmp_path / "model").mkdir()
    export_openclip(tmp_path / "run", tmp_path / "model")  # an empty folder is as good as none
    assert "replaces nothing" in refusal(OutputError, tmp_path / "run", tmp_path / "model").message
    (tmp_path / "file").touch()
    assert "is a file" in refusal(OutputError, tmp_path / "run", tmp_path / "file").message
    assert "question mark" in refusal(UsageError, tmp_path / "run", tmp_path / "what?").message
