"""Models that try to run code, to load something else, to pass for a model of another kind, or to end the worker.

Each `Hostile` writes a marker where its code runs.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from embq.app.doctor import probes
from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking, ModelConfig, ModelSpec
from embq.core.units import Sample
from embq.training.export.openclip import tokenizer_of, write_tokenizer
from embq.training.openclip.checkpoints import Arguments
from embq.training.openclip.models import checked_model, initial_model
from embq.worker.embedders import loading
from embq.worker.embedders.base import HasChunks
from embq.worker.embedders.lookup import locate
from embq.worker.embedders.query.loading import open_query_model
from embq.worker.embedders.query.sentence import LightSentence
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy
from tests.support.models.clip import (
    MODEL,
    PREPROCESS,
    hub_commit,
)
from tests.support.models.text import WIDTH, save_sentence_model, save_trunk

st = lazy("sentence_transformers.sentence_transformer.modules")
torch = lazy("torch")
open_clip = lazy("open_clip")


CODE = """
from pathlib import Path
Path({marker!r}).touch()
class Mine(BertModel): pass
class MyTokenizer(BertTokenizerFast): pass
"""


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `clip`, `trunk`, `st` and `dense` of models that load."""
    root = tmp_path_factory.mktemp("harmless")
    trunk = save_trunk(root / "trunk", "bert")
    clip = root / "clip"
    clip.mkdir()
    (clip / "open_clip_config.json").write_text(json.dumps({"model_cfg": MODEL, "preprocess_cfg": PREPROCESS}))
    torch.manual_seed(0)
    made = open_clip.create_model(f"local-dir:{clip}")
    save_file({name: one.contiguous() for name, one in made.state_dict().items()}, clip / "open_clip_model.safetensors")
    save_sentence_model(root / "st", [st.Transformer(str(trunk)), st.Pooling(WIDTH)])
    save_sentence_model(root / "dense", [st.Transformer(str(trunk)), st.Pooling(WIDTH), st.Dense(WIDTH, 8)])
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A copy of the harmless models, and the file that hostile code writes."""

    root: Path

    @property
    def marker(self) -> Path:
        return self.root / "code-ran"

    def edit(self, path: str, change: Callable[[Any], Any]) -> None:
        file = self.root / path
        said = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(change(said)))

    def bring_code(self, folder: str) -> None:
        (self.root / folder / "mine.py").write_text(CODE.format(marker=str(self.marker)))


@pytest.fixture
def place(harmless: Path, tmp_path: Path) -> Place:
    shutil.copytree(harmless, tmp_path / "models")
    return Place(root=tmp_path / "models")


def refusal(spec: str, modality: str = "text") -> str:
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(spec=spec, modalities=(modality,), precision="fp32"), "cpu")
    assert "\n" not in caught.value.message
    assert caught.value.next_step
    return caught.value.message


# --- code ---


def clip_tokenizer(place: Place) -> str:
    """The text tower's tokeniser is the folder's own code, and the configuration trusts it."""
    place.bring_code("clip")
    shutil.copy(place.root / "trunk" / "tokenizer.json", place.root / "clip")
    mapped = {"AutoTokenizer": [None, "mine.MyTokenizer"]}
    place.edit("clip/tokenizer_config.json", lambda said: {"tokenizer_class": "MyTokenizer", "auto_map": mapped})
    text = {"hf_tokenizer_name": "some/name", "tokenizer_kwargs": {"trust_remote_code": True}}
    place.edit("clip/open_clip_config.json", lambda said: _with_text(said, text))
    return f"open_clip:local-dir:{place.root / 'clip'}"


def _with_text(said: Any, more: dict[str, Any]) -> Any:
    said["model_cfg"]["text_cfg"] |= more
    return said


def nested_sentence_model(place: Place) -> str:
    """A module is a whole SentenceTransformer, which a file has trust code; then an activation is any function."""
    (place.root / "dense" / "mine.py").write_text(
        f"from pathlib import Path\ndef called():\n    Path({str(place.marker)!r}).touch()\n    raise ValueError\n"
    )
    place.edit("dense/2_Dense/config.json", lambda said: said | {"activation_function": "mine.called"})
    shutil.copytree(place.root / "trunk", place.root / "dense" / "inner")
    place.edit("dense/inner/sentence_bert_config.json", lambda said: {"trust_remote_code": True})
    whole = {"idx": 3, "name": "3", "path": "inner", "type": "sentence_transformers.SentenceTransformer"}
    place.edit("dense/modules.json", lambda modules: [*modules, whole])
    return f"st:{place.root / 'dense'}"


def code_of_a_module(place: Place) -> str:
    place.bring_code("st")
    place.edit("st/modules.json", lambda modules: [*modules, modules[1] | {"idx": 2, "name": "2", "type": "mine.Mine"}])
    return f"st:{place.root / 'st'}"


def code_of_a_trunk(place: Place) -> str:
    place.bring_code("trunk")
    mapped = {"AutoConfig": "mine.MyConfig", "AutoModel": "mine.Mine"}
    place.edit("trunk/config.json", lambda said: said | {"auto_map": mapped, "model_type": "mine"})
    return f"hf:{place.root / 'trunk'}"


def code_of_a_tokenizer(place: Place) -> str:
    place.bring_code("trunk")
    mapped = {"AutoTokenizer": [None, "mine.MyTokenizer"]}
    place.edit("trunk/tokenizer_config.json", lambda said: said | {"auto_map": mapped})
    return f"hf:{place.root / 'trunk'}"


def activation(place: Place) -> str:
    """Any class below torch could be imported and made."""
    place.edit("dense/2_Dense/config.json", lambda said: said | {"activation_function": "torch.utils.data.Sampler"})
    return f"st:{place.root / 'dense'}"


def method(place: Place) -> str:
    """Any method of the network could be called."""
    asked = {"text": {"method": "save_pretrained", "method_output_name": "last_hidden_state"}}
    place.edit("st/sentence_bert_config.json", lambda said: said | {"modality_config": asked})
    return f"st:{place.root / 'st'}"


def kernel(place: Place) -> str:
    """The package `kernels` would fetch and run it."""
    place.edit("trunk/config.json", lambda said: said | {"attn_implementation": "evil/kernel"})
    return f"hf:{place.root / 'trunk'}"


def quantised(place: Place) -> str:
    place.edit("trunk/config.json", lambda said: said | {"quantization_config": {"quant_method": "fp8"}})
    return f"hf:{place.root / 'trunk'}"


BRING_CODE = [
    (clip_tokenizer, "'trust_remote_code' in tokenizer_kwargs"),
    (nested_sentence_model, "SentenceTransformer"),
    (code_of_a_module, "mine.Mine"),
    (code_of_a_trunk, "auto_map"),
    (code_of_a_tokenizer, "auto_map"),
    (activation, "torch.utils.data.Sampler"),
    (method, "save_pretrained"),
    (kernel, "evil/kernel"),
    (quantised, "quantised"),
]


@pytest.mark.parametrize(("hostile", "named"), BRING_CODE, ids=lambda one: getattr(one, "__name__", ""))
def test_no_code_of_a_model_runs_when_it_is_loaded(
    hostile: Callable[[Place], str], named: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a configuration may say is a list."""
    monkeypatch.syspath_prepend(place.root / "dense")  # as any package that is installed
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    spec = hostile(place)
    with suppress(ModelError):
        load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")
    assert not place.marker.exists(), "code ran"
    assert named in refusal(spec)


@pytest.mark.parametrize("family", ["hf", "st"])
def test_an_architecture_that_is_built_in_is_loaded_without_the_code_that_it_once_had(
    family: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given `auto_map` of the folder's and of another repository's code, then the vectors are those without it."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    where, trunk = ("trunk", "trunk") if family == "hf" else ("st", "st")

    def vector() -> Any:
        config = ModelConfig(spec=f"{family}:{place.root / where}", modalities=("text",), precision="fp32")
        embedder = load(config, "cpu")
        return embedder.embed(embedder.prepare([Sample(ordinal=0, key="0", text="a text")]))["text"]

    expected = vector()
    place.bring_code(trunk)
    mapped = {"AutoConfig": "some/repository--mine.MyConfig", "AutoModel": "mine.Mine", "AutoTokenizer": "mine.My"}
    place.edit(f"{trunk}/config.json", lambda said: said | {"auto_map": mapped})
    np.testing.assert_array_equal(vector(), expected)
    assert not place.marker.exists(), "code ran"
    assert "mine" not in sys.modules


def test_the_checks_of_a_run_look_at_what_a_model_says(place: Place) -> None:
    with pytest.raises(ModelError, match="trust_remote_code"):
        locate(ModelSpec.parse(clip_tokenizer(place)))
    assert not place.marker.exists()


@pytest.mark.slow
def test_the_doctor_runs_no_code_of_a_model(place: Place) -> None:
    """`embq doctor --model`, in a process of its own."""
    [check] = [check for check in probes.models(clip_tokenizer(place)) if check.state == "fail"]
    assert "trust_remote_code" in check.detail
    assert not place.marker.exists()


@pytest.mark.parametrize("hostile", [clip_tokenizer, code_of_a_tokenizer, code_of_a_trunk])
def test_no_code_of_a_model_runs_that_is_swapped_after_its_check(
    hostile: Callable[[Place], str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries read all files again: open_clip took `trust_remote_code` from the folder."""
    spec = hostile(place)
    for check in ("check_model_folder", "check_settings"):
        monkeypatch.setattr(loading, check, lambda *_: None)
    with suppress(ModelError):
        load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")
    assert not place.marker.exists(), "code ran"


def test_a_link_that_is_turned_after_the_check_leads_to_the_folder_that_was_checked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, check = place.root / "link", loading.check_model_folder
    link.symlink_to(place.root / "st")

    def turned(folder: Path, *arguments: Any) -> None:
        check(folder, *arguments)
        link.unlink()
        link.symlink_to(place.root / "dense")

    monkeypatch.setattr(loading, "check_model_folder", turned)
    assert loading.model_source(ModelSpec.parse(f"st:{link}")) == str((place.root / "st").resolve())


@pytest.mark.parametrize("hostile", [clip_tokenizer, nested_sentence_model])
def test_no_code_runs_for_the_queries_of_an_index(
    hostile: Callable[[Place], str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec comes from the index's own record."""
    monkeypatch.syspath_prepend(place.root / "dense")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    rows = ModelConfig(spec=hostile(place), modalities=("text",), precision="fp32")
    with suppress(ModelError):
        open_query_model(rows, rows.outputs[0], "text")
    assert not place.marker.exists(), "code ran"
    with pytest.raises(ModelError):
        open_query_model(rows, rows.outputs[0], "text")


def test_no_code_runs_when_a_training_begins_or_is_exported(place: Place) -> None:
    """Open_clip makes the tokeniser of the folder that a training names."""
    folder = clip_tokenizer(place).removeprefix("open_clip:")
    given = {"model": folder, "cache_dir": None, "force_context_length": None}
    with suppress(ModelError):
        tokenizer_of(Arguments(given))
    assert not place.marker.exists(), "code ran"
    with pytest.raises(ModelError, match="trust_remote_code"):
        tokenizer_of(Arguments(given))
    with pytest.raises(ModelError, match="trust_remote_code"):
        write_tokenizer(open_clip.get_tokenizer("ViT-B-32"), place.root / "clip")
    with pytest.raises(ModelError, match="trust_remote_code"):
        initial_model(folder)
    assert not place.marker.exists()


def test_a_training_begins_with_the_model_of_the_hub_that_was_looked_at(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from open_clip_train import main as training
    from open_clip_train.params import parse_args
    from safetensors.torch import load_file

    from embq.training.openclip.__main__ import main
    from embq.worker.embedders import model_files

    hub, check = place.root / "hub", model_files.check_place
    hub_commit(hub, "b" * 40, seed=2)
    wanted = load_file(hub_commit(hub, "a" * 40, seed=1) / "open_clip_model.safetensors")
    hostile = clip_tokenizer(place).removeprefix("open_clip:")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    trained: dict[str, Any] = {}

    def moves_on(folder: Path, model: object) -> None:
        check(folder, model)
        (hub / "models--org--tiny" / "refs" / "main").write_text("b" * 40)

    def train(flags: list[str]) -> None:
        args = parse_args(flags)
        trained["name"] = args.model
        trained["model"], _, _ = training.create_model_and_transforms(args.model, args.pretrained)
        training.get_tokenizer(args.model)
        with pytest.raises(ModelError, match="trust_remote_code"):
            training.create_model_and_transforms(hostile, None)  # as of --distill-model

    monkeypatch.setattr(model_files, "check_place", moves_on)
    monkeypatch.setattr(training, "main", train)
    assert main(["--model", "hf-hub:org/tiny"]) == 0
    assert trained["name"] == f"hf-hub:org/tiny@{'a' * 40}"
    assert all(torch.equal(one, wanted[name]) for name, one in trained["model"].state_dict().items())
    assert not place.marker.exists()


def test_a_model_of_the_hub_without_weights_or_that_is_not_here_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_clip would begin with random weights, or try the hub and show a traceback."""
    hub_commit(place.root / "hub", "a" * 40, seed=1, weights=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.root / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"org/tiny has no open_clip_model.safetensors"):
        checked_model("hf-hub:org/tiny")
    for name in (f"hf-hub:org/tiny@{'c' * 40}", "hf-hub:org/other", "hf-hub:no/such/name"):
        with pytest.raises(ModelError, match="cannot be had from the model hub") as caught:
            initial_model(name) if "@" not in name else checked_model(name)
        assert "HF_HOME" in caught.value.next_step


def test_no_code_of_a_repository_in_the_cache_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = nested_sentence_model(place)
    repository = place.root / "hub" / "models--org--name"
    shutil.copytree(spec.removeprefix("st:"), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.root / "hub"))
    assert "SentenceTransformer" in refusal("st:org/name")
    assert not place.marker.exists()


# --- something else than the folder's own weights ---


def test_a_folder_below_the_inputs_of_an_upload_is_no_model(place: Place) -> None:
    """A laptop writes there, and names the folder in its run."""
    sent = place.root / "out" / "_inputs" / "0123456789abcdef" / "model"
    shutil.copytree(place.root / "st", sent)
    (place.root / "linked").symlink_to(sent)
    for spec in (f"st:{sent}", f"hf:{sent}", f"st:{place.root / 'linked'}"):
        assert "_inputs" in refusal(spec)
        rows = ModelConfig(spec=spec, modalities=("text",), precision="fp32")
        with pytest.raises(ModelError, match="_inputs"):
            open_query_model(rows, rows.outputs[0], "text")
        with pytest.raises(ModelError, match="_inputs"):
            locate(ModelSpec.parse(spec))
    shutil.copytree(place.root / "clip", sent.with_name("clip"))
    assert "_inputs" in refusal(f"open_clip:local-dir:{sent.with_name('clip')}", "image")


@pytest.mark.parametrize(
    ("folder", "file", "more", "named"),
    [
        ("st", "sentence_bert_config.json", {"tokenizer_name_or_path": "trunk"}, "tokenizer_name_or_path"),
        ("st", "sentence_bert_config.json", {"model_args": {"gguf_file": "x.gguf"}}, "gguf_file"),
        ("st", "adapter_config.json", {"base_model_name_or_path": "../trunk"}, "adapter"),
        ("trunk", "config.json", {"backbone": "/srv/other"}, "/srv/other"),
        ("trunk", "config.json", {"text_config": {"thing": "https://evil.example/x"}}, "https://evil.example/x"),
    ],
)
def test_nothing_is_loaded_from_elsewhere(folder: str, file: str, more: Any, named: str, place: Place) -> None:
    """A configuration names no other folder, repository or file."""
    place.edit(f"{folder}/{file}", lambda said: said | more)
    assert named in refusal(f"{'st' if folder == 'st' else 'hf'}:{place.root / folder}")


@pytest.mark.parametrize(
    ("tower", "more"),
    [
        ("text_cfg", {"hf_model_name": "{root}/trunk"}),
        ("text_cfg", {"hf_model_name": "trunk"}),
        ("text_cfg", {"hf_tokenizer_name": "../trunk"}),
        ("text_cfg", {"tokenizer_kwargs": {"bpe_path": "/etc/passwd"}}),
        ("vision_cfg", {"timm_model_name": "local-dir:{root}/timm"}),
    ],
)
def test_towers_of_open_clip_are_of_the_folder(
    tower: str, more: dict[str, Any], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf_model_name`, `hf_tokenizer_name` and `timm_model_name` may be paths to the libraries."""
    monkeypatch.chdir(place.root)
    filled = json.loads(json.dumps(more).replace("{root}", str(place.root)))

    def change(said: Any) -> Any:
        said["model_cfg"][tower] |= filled
        return said

    place.edit("clip/open_clip_config.json", change)
    for modality in ("image", "text"):
        assert next(iter(more)).split("_kwargs")[0] in refusal(f"open_clip:local-dir:{place.root / 'clip'}", modality)


class Writes:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("is_hostile", [False, True])
@pytest.mark.parametrize(
    ("folder", "file", "spec"),
    [
        ("dense/2_Dense", "pytorch_model.bin", "st:{root}/dense"),
        ("st", "pytorch_model.bin", "st:{root}/st"),
        ("trunk", "pytorch_model.bin", "hf:{root}/trunk"),
        ("clip", "open_clip_pytorch_model.bin", "open_clip:local-dir:{root}/clip"),
    ],
)
def test_weights_that_are_a_pickle_are_refused_in_one_sentence(
    folder: str, file: str, spec: str, is_hostile: bool, place: Place
) -> None:
    """Also in the folder of a module, harmless or not."""
    from safetensors.torch import load_file

    [weights] = (place.root / folder).glob("*.safetensors")
    content = load_file(weights)
    weights.unlink()
    pickled = place.root / folder / file
    if is_hostile:
        pickled.write_bytes(pickle.dumps(Writes(place.marker)))
    else:
        torch.save(content, pickled)
    assert f"a pickle, {pickled.relative_to(place.root).as_posix().split('/', 1)[1]}" in refusal(
        spec.format(root=place.root)
    )
    assert not place.marker.exists()


# --- what is checked is what is loaded ---

EVIL = {"attn_implementation": "evil/kernel"}
SENTENCE = "st/sentence_bert_config.json"


@pytest.mark.parametrize(
    ("file", "more", "named"),
    [
        (SENTENCE, {"config_args": {"_configuration_file": "evil.json"}}, "_configuration_file"),
        (SENTENCE, {"config_kwargs": {"_configuration_file": "evil.json"}}, "_configuration_file"),
        (SENTENCE, {"config_args": {"_attn_implementation": "sdpa"}}, "_attn_implementation"),
        (SENTENCE, {"model_kwargs": {"variant": "evil"}}, "variant"),
        (SENTENCE, {"tokenizer_args": {"tokenizer_type": "rag"}}, "tokenizer_type"),
        (SENTENCE, {"processor_kwargs": {"tokenizer_file": "evil.json"}}, "tokenizer_file"),
        (SENTENCE, {"transformer_task": "retrieval"}, "retrieval"),
        ("st/config.json", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files"),
        ("st/config.json", {"transformers_weights": "evil.safetensors"}, "transformers_weights"),
        ("st/tokenizer_config.json", {"tokenizer_class": "BertModel"}, "'BertModel' as tokenizer_class"),
        ("st/tokenizer_config.json", {"tokenizer_class": "AutoTokenizer"}, "AutoTokenizer"),
        ("st/tokenizer_config.json", {"tokenizer_class": "RagTokenizer"}, "'RagTokenizer' as tokenizer_class"),
        ("st/tokenizer_config.json", {"processor_class": "AutoModel"}, "AutoModel"),
        ("st/tokenizer_config.json", {"init_inputs": ["/etc/passwd"]}, "init_inputs"),
        ("st/preprocessor_config.json", {"image_processor_type": "AutoModel"}, "AutoModel"),
        (
            "st/processor_config.json",
            {"audio_tokenizer": {"audio_tokenizer_name_or_path": "evil"}},
            "audio_tokenizer_name_or_path, which",
        ),
        ("st/decoder_tokenizer/tokenizer_config.json", {"tokenizer_class": "BertModel"}, "decoder_tokenizer"),
    ],
)
def test_no_configuration_points_to_one_that_was_not_looked_at(file: str, more: Any, named: str, place: Place) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("evil.json", "config.4.0.0.json"):
        shutil.copy(place.root / "st" / "config.json", place.root / "st" / name)
        place.edit(f"st/{name}", lambda said: said | EVIL)
    save_file(load_file(place.root / "st/model.safetensors"), place.root / "st/evil.safetensors", {"format": "pt"})
    (place.root / file).parent.mkdir(exist_ok=True)
    place.edit(file, lambda said: said | more)
    assert named in refusal(f"st:{place.root / 'st'}")


def test_arguments_that_models_have_are_taken(place: Place) -> None:
    """What sentence-transformers' own models say is no attack."""
    more = {
        "config_args": {"attn_implementation": "eager"},
        "model_args": {"add_pooling_layer": False},
        "tokenizer_args": {"model_max_length": 12, "padding_side": "right"},
        "transformer_task": "feature-extraction",
    }
    place.edit(SENTENCE, lambda said: said | more)
    load(ModelConfig(spec=f"st:{place.root / 'st'}", modalities=("text",), precision="fp32"), "cpu")


def test_classes_of_transformers_that_read_texts_and_images_are_taken() -> None:
    """Each class of its tables, and no class of its own that loads anything else."""
    import transformers
    from transformers.models.auto import image_processing_auto, processing_auto, tokenization_auto

    from embq.worker.embedders.config_keys import READER

    own = {
        *tokenization_auto.TOKENIZER_MAPPING_NAMES.values(),
        *processing_auto.PROCESSOR_MAPPING_NAMES.values(),
        *(name for names in image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.values() for name in names.values()),
    }
    assert {name for name in own if name and not READER.fullmatch(name)} == {"RagTokenizer"}
    for name in filter(READER.fullmatch, dir(transformers)):
        with suppress(ImportError):  # of a package that is not here
            found = getattr(transformers, name)
            assert not hasattr(found, "from_pretrained") or not issubclass(found, torch.nn.Module)


@pytest.mark.parametrize("kind", ["st", "hf"])
def test_a_model_of_the_hub_is_loaded_from_the_files_that_were_looked_at(
    kind: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub moves on to another commit after the check, and the model is that of the check."""
    from embq.worker.embedders import model_files

    repository = place.root / "hub" / "models--org--name"
    for commit, network in (("a" * 40, "st"), ("b" * 40, "other")):
        if network == "other":
            trunk = save_trunk(place.root / "trunk-2", "bert", seed=1)
            save_sentence_model(place.root / network, [st.Transformer(str(trunk)), st.Pooling(WIDTH)])
        shutil.copytree(place.root / network, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    main = repository / "refs" / "main"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.root / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check = model_files.check_place

    def moves_on(folder: Path, model: object) -> None:
        check(folder, model)
        main.write_text("b" * 40)

    def fingerprint(spec: str) -> str:
        return load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu").fingerprint

    wanted = fingerprint(f"{kind}:{place.root / 'st'}?max_length=12")
    main.write_text("a" * 40)
    monkeypatch.setattr(model_files, "check_place", moves_on)
    spec = f"{kind}:org/name?max_length=12" + ("&embeds=text" if kind == "hf" else "")
    assert fingerprint(spec) == wanted


def test_the_configuration_of_a_tower_of_the_hub_is_looked_at(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open_clip reads that of the repository in `hf_model_name`."""
    repository = place.root / "hub" / "models--org--tower"
    shutil.copytree(place.root / "trunk", repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place.root / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place.edit(f"hub/models--org--tower/snapshots/{'a' * 40}/config.json", lambda said: said | EVIL)
    place.edit("clip/open_clip_config.json", lambda said: _with_text(said, {"hf_model_name": "org/tower"}))
    assert "'evil/kernel' as attn_implementation" in refusal(f"open_clip:local-dir:{place.root / 'clip'}")


@pytest.mark.parametrize(
    ("folder", "file", "spec"),
    [
        ("dense/2_Dense", "pytorch_model.bin", "st:{root}/dense"),
        ("trunk", "pytorch_model.bin", "hf:{root}/trunk"),
    ],
)
def test_safetensors_that_nothing_loads_hide_no_pickle(folder: str, file: str, spec: str, place: Place) -> None:
    from safetensors.torch import load_file

    weights = place.root / folder / "model.safetensors"
    torch.save(load_file(weights), place.root / folder / file)
    weights.rename(weights.with_name("decoy.safetensors"))
    assert f"a pickle, {(place.root / folder / file).relative_to(place.root).as_posix().split('/', 1)[1]}" in refusal(
        spec.format(root=place.root)
    )


@pytest.mark.parametrize("kind", ["st", "hf"])
@pytest.mark.parametrize("shard", ["../trunk/model.safetensors", "{root}/trunk/model.safetensors", "model.bin"])
def test_weights_are_files_of_the_folder(kind: str, shard: str, place: Place) -> None:
    """An index may name any path."""
    from safetensors.torch import load_file

    weights = place.root / "st" / "model.safetensors"
    map_of = dict.fromkeys(load_file(weights), shard.format(root=place.root))
    weights.unlink()
    place.edit("st/model.safetensors.index.json", lambda _: {"metadata": {}, "weight_map": map_of})
    assert "model.safetensors.index.json names" in refusal(f"{kind}:{place.root / 'st'}")


def test_a_checkpoint_in_several_files_is_loaded(place: Place) -> None:
    """What transformers saves is no attack."""
    from transformers import BertModel

    spec = f"hf:{place.root / 'trunk'}"
    model = BertModel.from_pretrained(place.root / "trunk")
    (place.root / "trunk" / "model.safetensors").unlink()
    model.save_pretrained(place.root / "trunk", max_shard_size="20KB")
    assert len([*(place.root / "trunk").glob("*.safetensors")]) > 1
    load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")


# --- bounds ---


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("st:{root}/st", "st/modules.json"),
        ("st:{root}/st", "st/config.json"),
        ("st:{root}/st", "st/tokenizer.json"),
        ("st:{root}/st", "st/README.md"),
        ("st:{root}/st", "st/additional_chat_templates/one.jinja"),
        ("st:{root}/dense", "dense/2_Dense/config.json"),
        ("st:{root}/dense", "dense/2_Dense/model.safetensors"),
        ("hf:{root}/trunk", "trunk/model.safetensors"),
        ("open_clip:local-dir:{root}/clip", "clip/open_clip_config.json"),
        ("hf:{root}/trunk?lora={root}/lora", "lora/adapter_config.json"),
    ],
)
def test_a_fifo_in_place_of_a_file_is_refused(spec: str, file: str, place: Place) -> None:
    """A reader of one waits for ever."""
    (place.root / file).parent.mkdir(exist_ok=True)
    (place.root / file).unlink(missing_ok=True)
    os.mkfifo(place.root / file)
    assert "no regular file" in refusal(spec.format(root=place.root))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("spec", "file", "more"),
    [
        ("hf:{root}/trunk", "trunk/config.json", {"num_hidden_layers": 10_000_000}),
        ("st:{root}/st", "st/config.json", {"num_hidden_layers": 10_000_000}),
        ("st:{root}/st", "st/1_Pooling/config.json", {"layers": [1] * 100_000}),
    ],
)
def test_a_network_of_ten_million_layers_is_not_made(spec: str, file: str, more: Any, place: Place) -> None:
    place.edit(file, lambda said: said | more)
    assert "4096 at most" in refusal(spec.format(root=place.root))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("hf:{root}/trunk", "trunk/model.safetensors"),
        ("st:{root}/dense", "dense/2_Dense/model.safetensors"),
        ("open_clip:local-dir:{root}/clip", "clip/open_clip_model.safetensors"),
    ],
)
@pytest.mark.parametrize("count", [150_000, 300_000])
def test_weights_of_hundreds_of_thousands_of_tensors_are_refused(
    spec: str, file: str, count: int, place: Place
) -> None:
    """Each costs the libraries time and memory, whether the network has it or not."""
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": one for number in range(count)}).encode()
    (place.root / file).write_bytes(struct.pack("<Q", len(header)) + header)
    said = refusal(spec.format(root=place.root))
    assert "100,000 tensors" in said or "header of at most" in said


def test_small_tensors_are_not_made_large_before_shapes_are_compared(place: Place) -> None:
    """A LoRA of 128 KB multiplies to 1 GB; a dense layer is made as its configuration says, and filled, for 2 GB."""
    (place.root / "lora").mkdir()
    place.edit("lora/adapter_config.json", lambda said: {"peft_type": "LORA", "r": 1})
    name = "encoder.layer.0.attention.self.query"
    factors = {"A": torch.ones(1, 16_384), "B": torch.ones(16_384, 1)}
    tensors = {f"{name}.lora_{kind}.weight": one for kind, one in factors.items()}
    save_file(tensors, place.root / "lora" / "adapter_model.safetensors")
    place.edit("dense/2_Dense/config.json", lambda said: {**said, "out_features": (1 << 29) // WIDTH})
    hostile = {
        f"hf:{place.root}/trunk?lora={place.root}/lora": "no weight of that shape",
        f"st:{place.root}/dense": "2_Dense/model.safetensors has no weights of",
    }
    for spec, said in hostile.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is used now
        before = peak_bytes()
        assert said in refusal(spec)
        assert peak_bytes() - before < 300 << 20


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


# --- panics ---


def panicking(place: Place, folder: str) -> None:
    """The tokeniser of a folder panics at each `~`: its table of characters leads out of itself there."""
    table = [0] * 256
    table[ord("~")] = 100_000 << 10 | 1 << 8 | ord("~")
    packed = struct.pack("<257I", 4 * len(table), *table)
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(packed).decode()}
    place.edit(f"{folder}/tokenizer.json", lambda said: said | {"normalizer": normalizer})


@pytest.mark.parametrize("folder", ["st:{root}/st", "hf:{root}/trunk", "open_clip:local-dir:{root}/clip"])
def test_a_panic_of_the_tokeniser_is_the_failure_of_its_text(folder: str, place: Place) -> None:
    spec = folder.format(root=place.root)
    if "clip" in spec:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(place.root / "trunk" / name, place.root / "clip")
        place.edit("clip/open_clip_config.json", lambda said: _with_text(said, {"hf_tokenizer_name": "some/name"}))
    panicking(place, spec.rpartition("/")[2])
    config = ModelConfig(spec=spec, modalities=("text",), precision="fp32")
    samples = [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(["a", "b ~", "c", "~", "d"])]
    answers = load(config, "cpu").prepare(samples)
    assert [getattr(answer, "code", "") for answer in answers] == ["", "not_tokenised", "", "not_tokenised", ""]
    if "clip" not in spec:
        chunking = Chunking(tokens=20, overlap=0)
        cutting = load(ModelConfig(spec=spec, modalities=("text",), precision="fp32", chunking=chunking), "cpu")
        assert isinstance(cutting, HasChunks)
        with pytest.raises(SampleError) as caught:
            cutting.chunks(samples[1], lambda: None)
        assert caught.value.code == "not_tokenised"
        assert len(cutting.chunks(samples[0], lambda: None)) == 1


def test_a_panic_of_the_tokeniser_fails_a_query(place: Place) -> None:
    """`embq serve` answers it, with torch and without."""
    panicking(place, "st")
    rows = ModelConfig(spec=f"st:{place.root / 'st'}", modalities=("text",), precision="fp32")
    model, _ = open_query_model(rows, rows.outputs[0], "text")
    for asked in (model, LightSentence(place.root / "st", ModelSpec.parse(rows.spec))):
        with pytest.raises(SampleError) as caught:
            asked.text("a ~")
        assert caught.value.code == "not_tokenised"
        asked.text("a")


def test_a_tokeniser_that_panics_while_the_model_is_loaded_is_an_error_of_the_model(place: Place) -> None:
    """It is tried with a text where it has token types."""
    packed = base64.b64encode(struct.pack("<2I", 4, 0)).decode()
    for kind in ("st", "trunk"):
        normalizer = {"type": "Precompiled", "precompiled_charsmap": packed}
        place.edit(f"{kind}/tokenizer.json", lambda said, more=normalizer: said | {"normalizer": more})
        names = ["input_ids", "token_type_ids", "attention_mask"]
        place.edit(f"{kind}/tokenizer_config.json", lambda said, more=names: said | {"model_input_names": more})
    for spec in ("st:{root}/st", "hf:{root}/trunk"):
        assert "PanicException" in refusal(spec.format(root=place.root))


# --- another kind of model ---


def test_a_cross_encoder_is_no_model_of_texts(place: Place) -> None:
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig.from_pretrained(place.root / "trunk", num_labels=1)
    BertForSequenceClassification(config).save_pretrained(place.root / "old")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place.root / "trunk" / file, place.root / "old")
    CrossEncoder(str(place.root / "old"), device="cpu").save_pretrained(str(place.root / "new"))
    for folder in ("old", "new"):
        assert "is a CrossEncoder" in refusal(f"st:{place.root / folder}")


def test_a_sparse_encoder_is_no_model_of_dense_vectors(place: Place) -> None:
    """By what it says of itself, and by its modules alone."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
    from transformers import BertConfig, BertForMaskedLM

    masked = place.root / "masked"
    BertForMaskedLM(BertConfig.from_pretrained(place.root / "trunk")).save_pretrained(masked)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place.root / "trunk" / file, masked)
    made = SparseEncoder(modules=[MLMTransformer(str(masked)), SpladePooling("max")], device="cpu")
    made.save_pretrained(str(place.root / "sparse"))
    assert "is a SparseEncoder" in refusal(f"st:{place.root / 'sparse'}")
    (place.root / "sparse" / "config_sentence_transformers.json").unlink()
    assert "is a SparseEncoder" in refusal(f"st:{place.root / 'sparse'}")
    (masked / "README.md").write_text("---\nlicense: mit\ntags:\n- splade\n---\n# Model\n")
    assert all("is a SparseEncoder" in refusal(f"{family}:{masked}") for family in ("st", "hf"))
    load(ModelConfig(spec=f"hf:{masked}?pooling=mean", modalities=("text",), precision="fp32"), "cpu")


def test_a_folder_of_pylate_gives_many_vectors(place: Place) -> None:
    dense = {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"}
    place.edit("st/modules.json", lambda modules: [modules[0], dense])
    assert "is a MultiVectorEncoder by its modules.json" in refusal(f"st:{place.root / 'st'}")


# --- anything else ---


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 100_000, b"\xff\xfe", b"[1]", b'"x"', b"null", b'{"model_cfg": 3}', b'[{"path": 1, "type": 2}]'],
)
@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("st:{root}/st", "st/modules.json"),
        ("st:{root}/st", "st/config.json"),
        ("st:{root}/st", "st/sentence_bert_config.json"),
        ("st:{root}/st", "st/tokenizer.json"),
        ("st:{root}/st", "st/tokenizer_config.json"),
        ("st:{root}/dense", "dense/2_Dense/config.json"),
        ("hf:{root}/trunk", "trunk/config.json"),
        ("hf:{root}/trunk", "trunk/tokenizer.json"),
        ("open_clip:local-dir:{root}/clip", "clip/open_clip_config.json"),
    ],
)
def test_a_file_that_is_none_of_its_kind_is_an_error_of_the_model(
    spec: str, file: str, content: bytes, place: Place
) -> None:
    """Whatever a file holds, it is one sentence, or the libraries take it."""
    (place.root / file).write_bytes(content)
    with suppress(ModelError):  # anything else is a crash
        load(ModelConfig(spec=spec.format(root=place.root), modalities=("text",), precision="fp32"), "cpu")


def test_the_models_that_are_attacked_here_load_as_they_are(place: Place) -> None:
    for spec in ("st:{root}/st", "st:{root}/dense", "hf:{root}/trunk", "open_clip:local-dir:{root}/clip"):
        load(ModelConfig(spec=spec.format(root=place.root), modalities=("text",), precision="fp32"), "cpu")
