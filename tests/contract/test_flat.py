"""Texts that lie one after the other, without padding, get the vectors of sentence-transformers all the same.

The kernel here is the definition: each text alone. A GPU's own is compared with it where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.errors import DeviceError, DeviceFullError, Exit, SampleError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import padded_tokens
from embq.worker.embedders.device.placement import all_on_device
from embq.worker.embedders.device.tuning import FLAT as FLAT_PATH
from embq.worker.embedders.device.tuning import OptionalPaths
from embq.worker.embedders.registry import load
from embq.worker.embedders.text import flat_attention
from embq.worker.embedders.text.flat_attention import (
    CAUSAL,
    EVERYWHERE,
    NAME,
    AttentionWithinTexts,
    Window,
    attend_by_length,
    kernel_for,
)
from embq.worker.embedders.text.flat_batch import FlatTexts, flattened
from embq.worker.embedders.text.forward import probe_texts
from embq.worker.embedders.text.prompts import Prompt
from tests.support.lazy import lazy
from tests.support.models.text import (
    CORPUS,
    POSITIONS,
    TRUNKS,
    WIDTH,
    bytes_pieces,
    save_sentence_model,
    save_trunk,
    sentence_pieces,
    word_pieces,
)

sentence_transformers = lazy("sentence_transformers")
st = lazy("sentence_transformers.sentence_transformer.modules")
transformers = lazy("transformers")
torch = lazy("torch")
flat_pooling = lazy("embq.worker.embedders.text.flat_pooling")
sentence = lazy("embq.worker.embedders.text.sentence")


FLAT = (
    *("bert", "distilbert", "xlm-roberta", "modernbert", "roberta", "camembert", "electra"),
    *("albert", "ernie", "nomic_bert", "gte", "jina_embeddings_v3", "eurobert", "ultrabert", "modernbert-decoder"),
    *("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "gemma3_text both ways"),
)

TEXTS = ("a", CORPUS[0], ".", " ".join(CORPUS), "a <pad> is no padding <pad> here", "x", *CORPUS[1:], "a")
"""One token beside as many as the model reads; one text twice; and a token of padding that is part of a text."""

PROMPT = "the text is: "


def more_trunks() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """The families that share their code with one of `TRUNKS`, and still have names of their own."""
    import transformers as tf

    size = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

    def of_roberta(config: Any, model: Any) -> Callable[[], tuple[Any, Any]]:
        def make() -> tuple[Any, Any]:
            tokenizer = sentence_pieces(begins=True)
            trunk = model(config(vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, **size))
            return trunk, tokenizer

        return make

    def electra() -> tuple[Any, Any]:
        tokenizer = word_pieces()
        config = tf.ElectraConfig(vocab_size=len(tokenizer), embedding_size=16, max_position_embeddings=64, **size)
        return tf.ElectraModel(config), tokenizer

    def of(family: str, pieces: Callable[[], Any], **more: Any) -> Callable[[], tuple[Any, Any]]:
        def make() -> tuple[Any, Any]:
            tokenizer = pieces()
            given = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, **size, **more}
            return tf.AutoModel.from_config(tf.AutoConfig.for_model(family, **given)), tokenizer

        return make

    grouped = {"num_key_value_heads": 1, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    # Windows that are shorter than the texts, and a layer without one.
    windows = {**grouped, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    named = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    return {
        "roberta": of_roberta(tf.RobertaConfig, tf.RobertaModel),
        "camembert": of_roberta(tf.CamembertConfig, tf.CamembertModel),
        "electra": electra,
        "albert": of("albert", word_pieces, embedding_size=16),
        **{family: of(family, word_pieces) for family in ("ernie", "nomic_bert", "gte", "ultrabert", "mobilebert")},
        "jina_embeddings_v3": of("jina_embeddings_v3", lambda: sentence_pieces(begins=True)),
        "eurobert": of("eurobert", word_pieces, **grouped),
        "modernbert-decoder": of(
            "modernbert-decoder", word_pieces, local_attention=16, global_attn_every_n_layers=2, **named
        ),
        **{family: of(family, bytes_pieces, **grouped) for family in ("qwen3", "llama")},
        **{family: of(family, bytes_pieces, **windows) for family in ("mistral", "gemma2", "gemma3_text")},
        "gemma3_text both ways": of("gemma3_text", bytes_pieces, use_bidirectional_attention=True, **windows),
        "lfm2": of("lfm2", bytes_pieces, **{**grouped, "layer_types": ["conv", "full_attention"]}),
    }


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Family -> folder of its tiny trunk."""
    root = tmp_path_factory.mktemp("trunks")
    with pytest.MonkeyPatch.context() as patch:
        for family, make in more_trunks().items():
            patch.setitem(TRUNKS, family, make)

        def trunk(family: str) -> Path:
            if (root / family).exists():
                return root / family
            try:
                return save_trunk(root / family, family, seed=1)
            except ValueError as error:
                if "Unrecognized model identifier" not in str(error):
                    raise
                pytest.skip(f"this transformers does not know {family}")

        yield trunk


@pytest.fixture(scope="module")
def transformer(trunks: Callable[[str], Path]) -> st.Transformer:
    """The first module of the models that are made of it in memory."""
    return st.Transformer(str(trunks("bert")))


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> OptionalPaths:
    """Optional paths of the process, for this test alone."""
    paths = OptionalPaths()
    monkeypatch.setattr("embq.worker.embedders.device.trial.PATHS", paths)
    return paths


def loaded(spec: str, precision: str = "fp32") -> Any:
    """The embedder with padding, as on a device without a kernel."""
    embedder: Any = load(ModelConfig(spec=spec, modalities=("text",), precision=precision), "cpu")
    embedder.flatten(None)
    return embedder


def flat(spec: str, precision: str = "fp32") -> Any:
    """The embedder with the kernel of CPUs; the test fails where it stays with padding."""
    embedder = loaded(spec, precision)
    embedder.flatten(attend_by_length)
    assert embedder.cost is sum
    return embedder


def vectors_of(embedder: Any, texts: tuple[str, ...] | list[str] = TEXTS) -> np.ndarray:
    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)])
    assert not [answer for answer in prepared if isinstance(answer, SampleError)]
    rows: np.ndarray = embedder.embed(prepared)["text"]
    return rows


def assert_equal(rows: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))
    assert np.abs(expected - expected.mean(0)).max() > 1e-2, "all texts have the same vector, and nothing was compared"


@pytest.mark.parametrize("family", FLAT)
def test_flat_padded_and_sentence_transformers_agree(family: str, trunks: Callable[[str], Path]) -> None:
    folder = trunks(family)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(
        list(TEXTS), show_progress_bar=False
    )
    embedder = loaded(f"st:{folder}")
    assert_equal(vectors_of(embedder), expected)
    embedder.flatten(attend_by_length)
    assert embedder.cost is sum
    assert_equal(vectors_of(embedder), expected)
    assert_equal(np.concatenate([vectors_of(embedder, [text]) for text in TEXTS[:3]]), expected[:3])


POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def test_all_kinds_of_pooling_are_tried() -> None:
    assert set(POOLING) == set(flat_pooling.MODES)


@pytest.mark.parametrize(
    ("modes", "include_prompt"), [*((mode, False) for mode in POOLING), (("weightedmean", "cls", "max"), True)], ids=str
)
def test_every_pooling_is_that_of_sentence_transformers(
    modes: Any, include_prompt: bool, transformer: st.Transformer
) -> None:
    width = WIDTH * (len(modes) if isinstance(modes, tuple) else 1)
    pooling = st.Pooling(WIDTH, modes, include_prompt=include_prompt)
    modules = [transformer, pooling, st.Dense(width, 24), st.LayerNorm(24), st.Normalize()]
    options = {"prompts": {"passage": PROMPT}, "default_prompt_name": "passage", "truncate_dim": 20}
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", **options).eval()
    expected = model.encode(list(TEXTS), show_progress_bar=False)
    embedder = sentence.SentenceEmbedder(
        model,
        ModelConfig(spec="st:model", modalities=("text",), precision="fp32"),
        torch.device("cpu"),
        prompt=Prompt(text=PROMPT),
        batch_size=8,
        token_budget=100,
    )
    assert_equal(vectors_of(embedder), expected)
    embedder.flatten(attend_by_length)
    assert embedder.cost is sum
    rows = vectors_of(embedder)
    assert rows.shape == (len(TEXTS), 20)
    assert_equal(rows, expected)


def test_poolings_of_encoders_are_the_same_flat_and_padded(trunks: Callable[[str], Path]) -> None:
    embedder = loaded(f"hf:{trunks('xlm-roberta')}?pooling=max+lasttoken+mean&normalize=true")
    expected = vectors_of(embedder)
    embedder.flatten(attend_by_length)
    assert embedder.cost is sum
    assert_equal(vectors_of(embedder), expected)


def test_many_texts_of_very_unequal_lengths_keep_their_order(trunks: Callable[[str], Path]) -> None:
    random = np.random.default_rng(0)
    words = " ".join(CORPUS).split()
    texts = [" ".join(random.choice(words, size=int(random.choice([1, 2, 60])))) for _ in range(300)]
    embedder = loaded(f"hf:{trunks('distilbert')}")
    expected = vectors_of(embedder, texts)
    embedder.flatten(attend_by_length)
    assert_equal(vectors_of(embedder, texts), expected)


def test_token_types_travel_with_the_tokens(tmp_path: Path) -> None:
    tokenizer = word_pieces(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = save_trunk(tmp_path / "typed", "bert", seed=2, tokenizer=tokenizer)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(
        list(TEXTS), show_progress_bar=False
    )
    assert_equal(vectors_of(flat(f"st:{folder}")), expected)


def test_no_mask_is_made_for_the_attention_and_the_model_is_as_it_was_after_it(trunks: Callable[[str], Path]) -> None:
    embedder = loaded(f"hf:{trunks('bert')}")
    config = embedder._trunk.config
    before = config._attn_implementation
    arguments = {
        "config": config,
        "inputs_embeds": torch.zeros(2, 4, WIDTH),
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
    }
    assert transformers.masking_utils.create_bidirectional_mask(**arguments) is not None
    attention = AttentionWithinTexts(config)
    with attention:
        with attention:  # as by two threads, of which one is done before the other
            pass
        assert config._attn_implementation == NAME
        assert transformers.masking_utils.create_bidirectional_mask(**arguments) is None
    assert config._attn_implementation == before
    with pytest.raises(RuntimeError, match="on purpose"), attention:
        raise RuntimeError("on purpose")
    assert config._attn_implementation == before


# --- the choice of a path ---


def test_a_module_that_looks_at_padded_tokens_keeps_the_padding(
    trunks: Callable[[str], Path], tmp_path: Path, events: pytest.LogCaptureFixture
) -> None:
    of_tokens = st.Dense(WIDTH, WIDTH, module_input_name="token_embeddings", module_output_name="token_embeddings")
    head = [of_tokens, st.Pooling(WIDTH, "mean")]
    folder = save_sentence_model(tmp_path / "model", [st.Transformer(str(trunks("bert"))), *head])
    embedder = loaded(f"st:{folder}")
    embedder.flatten(attend_by_length)
    assert embedder.cost is padded_tokens
    assert "path=padded lacks=modules" in events.text
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(
        list(TEXTS), show_progress_bar=False
    )
    assert_equal(vectors_of(embedder), expected)


def looks_at_all(query: Any, key: Any, value: Any, *, texts: FlatTexts, scale: Any, window: Window) -> Any:
    """Attention to the tokens of all texts."""
    whole = FlatTexts(
        ids=texts.ids, types=None, starts=texts.starts[[0, -1]], lengths=np.array([len(texts.ids)], dtype=np.int32)
    )
    return attend_by_length(query, key, value, texts=whole, scale=scale, window=window)


def slightly_wrong(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """So little that the vectors have a cosine of more than 0.9999 with those of the padded path."""
    return 1.01 * attend_by_length(query, key, value, **options)


def fails(query: Any, key: Any, value: Any, **options: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")


def gives_no_numbers(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return torch.full_like(value, torch.nan)


@pytest.mark.parametrize(
    ("family", "kernel", "said"),
    [
        ("bert", looks_at_all, "its error is"),
        ("bert", gives_no_numbers, "its error is inf"),
        ("bert", fails, "no kernel image"),
        ("bert", slightly_wrong, "its error is"),
        *((family, attend_by_length, "path=padded lacks=architecture") for family in ("mpnet", "t5", "lfm2")),
        ("gemma2", attend_by_length, "scores are capped"),
        ("mobilebert", attend_by_length, "its error is"),  # it does not say that it reads the neighbours of each token
    ],
)
def test_a_kernel_that_gives_other_vectors_and_an_architecture_whose_tokens_meet_elsewhere_stay_padded(
    family: str, kernel: Any, said: str, trunks: Callable[[str], Path], events: pytest.LogCaptureFixture
) -> None:
    embedder = loaded(f"st:{trunks(family)}")
    expected = vectors_of(embedder)
    embedder.flatten(kernel)
    assert embedder.cost is padded_tokens
    assert "path=padded" in events.messages[-1]
    assert said in events.messages[-1]
    np.testing.assert_array_equal(vectors_of(embedder), expected)


def test_the_log_names_the_path(trunks: Callable[[str], Path], events: pytest.LogCaptureFixture) -> None:
    spec = f"st:{trunks('bert')}"
    flat(spec)
    told = [message for message in events.messages if message.startswith("attention ")]
    told = told[1:]  # behind that of the load
    assert told[0] == f"attention model={spec} path=padded lacks=kernel"
    assert told[1].startswith(f"attention model={spec} path=flat error_ratio=1.0")


@pytest.mark.usefixtures("bf16_cpu")
def test_half_precision_agrees_within_its_rounding_and_the_fingerprint_is_one(trunks: Callable[[str], Path]) -> None:
    spec = f"st:{trunks('bert')}"
    ours, padded = flat(spec, "bf16"), loaded(spec, "bf16")
    assert ours.fingerprint == padded.fingerprint
    left, right = vectors_of(ours).astype(np.float64), vectors_of(padded).astype(np.float64)
    cosines = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() >= 0.9999


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk whose vectors rounding changes as much as those of a trained one, unlike those of `TRUNKS`."""
    import transformers as tf

    tokenizer = word_pieces()
    size = {"hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 192}
    config = tf.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRUNKS, "deep", lambda: (tf.BertModel(config), tokenizer))
        return save_trunk(tmp_path_factory.mktemp("deep") / "deep", "deep", seed=1)


@pytest.mark.usefixtures("bf16_cpu")
def test_a_path_that_is_as_near_to_fp32_is_taken_however_far_from_the_padded_one(deep: Path) -> None:
    """Given two paths in bf16 whose vectors differ more than by a cosine of 0.9999, then the flat one is taken."""
    left, right = (
        vectors_of(embedder(f"st:{deep}", "bf16"), probe_texts()).astype(np.float64) for embedder in (flat, loaded)
    )
    cosines = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() < 0.9999


def test_a_kernel_that_breaks_the_device_ends_the_process(
    trunks: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, paths: OptionalPaths
) -> None:
    """Given a kernel whose fault is followed by that of every call, then it is an error of the device."""
    embedder = loaded(f"st:{trunks('bert')}")
    padded = embedder._padded
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    broken: list[bool] = []

    def breaks(query: Any, key: Any, value: Any, **options: Any) -> Any:
        broken.append(True)
        raise fault

    def checked(batch: Any) -> Any:
        if broken:
            raise fault
        return padded(batch)

    monkeypatch.setattr(embedder, "_padded", checked)
    told: list[object] = []
    paths.report = told.append
    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        embedder.flatten(breaks)
    assert caught.value.exit_code == Exit.DEVICE == 71
    assert told == [["flat"]], "it is told of as long as the process lives"


def test_a_process_whose_predecessor_died_with_flat_batches_pads_them(
    trunks: Callable[[str], Path], paths: OptionalPaths, events: pytest.LogCaptureFixture
) -> None:
    paths.without = frozenset({FLAT_PATH})
    embedder = loaded(f"st:{trunks('bert')}")
    embedder.flatten(fails)
    assert embedder.cost is padded_tokens
    assert "path=padded failed='the process before this one died with it'" in events.messages[-1]


def test_a_device_without_room_for_fp32_pads(
    trunks: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, events: pytest.LogCaptureFixture
) -> None:
    def full(batch: Any) -> Any:
        raise DeviceFullError("the memory of the device is too small")

    embedder = loaded(f"st:{trunks('bert')}")
    monkeypatch.setattr(embedder._network, "embed_in_fp32", full)
    embedder.flatten(attend_by_length)
    assert embedder.cost is padded_tokens
    assert "path=padded failed='no room" in events.messages[-1]


@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize("kind", ["st", "hf"])
def test_a_trunk_that_computes_in_another_type_for_once_is_padded_for_once(
    kind: str, trunks: Callable[[str], Path]
) -> None:
    spec = f"{kind}:{trunks('bert')}"
    embedder, padded = flat(spec, "bf16"), loaded(spec)
    calls = []
    path = embedder._flat
    path._trunk._kernel = lambda *args, **options: calls.append(1) or attend_by_length(*args, **options)
    vectors_of(embedder)
    assert calls
    calls.clear()
    rows = embedder.embed_in_fp32(embedder.prepare([Sample(ordinal=0, key="0", text=TEXTS[1])]))["text"]
    assert not calls, "torch's kernel knows half precision only"
    np.testing.assert_allclose(rows, vectors_of(padded, [TEXTS[1]]), atol=0.05)
    vectors_of(embedder)
    assert calls


# --- on their way to the device ---


def test_texts_are_sent_as_they_are() -> None:
    batch = [{"input_ids": np.arange(n, dtype=np.int32)} for n in (3, 1, 5)]
    batch[1]["token_type_ids"] = np.array([2], dtype=np.int32)
    texts = flattened(batch, torch.device("cpu"))
    assert texts.ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert texts.places().tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert texts.types is not None
    assert texts.types.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert (texts.starts.tolist(), texts.longest) == ([0, 3, 4, 9], 5)


@pytest.mark.usefixtures("bf16_cpu")
def test_a_cpu_leaves_out_padding_in_each_precision(trunks: Callable[[str], Path]) -> None:
    for precision in ("fp32", "bf16"):
        config = ModelConfig(spec=f"st:{trunks('bert')}", modalities=("text",), precision=precision)
        assert load(config, "cpu").cost is sum


def test_no_kernel_is_chosen_where_torch_has_none() -> None:
    assert kernel_for(torch.device("cuda"), torch.float32) is None


def test_options_that_an_older_kernel_lacks_are_given_only_where_they_matter() -> None:
    given: list[dict[str, Any]] = []

    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> Any:
        given.append({"max": (max_q, max_k), "starts": cu_seq_q.tolist()})
        return value

    texts, tokens = two_texts()
    kernel = flat_attention._kernel_of_torch(older)
    kernel(tokens, tokens, tokens, texts=texts, scale=16**-0.5, window=EVERYWHERE)
    assert given == [{"max": (4, 4), "starts": [0, 4, 8]}]
    for options in ({"scale": 1.0, "window": EVERYWHERE}, {"scale": None, "window": (3, 3)}, {"window": CAUSAL}):
        with pytest.raises(NotImplementedError):
            kernel(tokens, tokens, tokens, texts=texts, **{"scale": None, **options})


@pytest.mark.parametrize("window", [EVERYWHERE, CAUSAL, (2, 2), (2, 0), (0, 0), (9, 9), (9, 0)])
def test_windows_are_those_of_their_definition(window: Window) -> None:
    """Given two heads of the query for each of the key, then each token sees those of its text within the window."""
    lengths = np.array([1, 5, 5, 3, 7], dtype=np.int32)
    starts = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32)
    texts = FlatTexts(ids=torch.zeros(lengths.sum(), dtype=torch.long), types=None, starts=starts, lengths=lengths)
    query, key, value = (torch.randn(len(texts.ids), heads, 8) for heads in (4, 2, 2))
    text, place = texts.of_each(torch.arange(len(lengths))), texts.places()
    ahead = place - place[:, None]
    seen = text == text[:, None]
    seen &= (ahead >= -(99 if window[0] is None else window[0])) & (ahead <= (99 if window[1] is None else window[1]))
    whole = [each.repeat_interleave(2, 1).transpose(0, 1) for each in (key, value)]
    scores = (query.transpose(0, 1) @ whole[0].transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ whole[1]).transpose(0, 1)
    torch.testing.assert_close(attend_by_length(query, key, value, texts=texts, scale=0.3, window=window), expected)


def test_a_causal_kernel_with_grouped_heads_is_called_as_each_torch_has_it() -> None:
    texts, tokens = two_texts()
    given: list[dict[str, Any]] = []

    def of_2_10(query: Any, key: Any, value: Any, *sizes: Any, is_causal: bool = False) -> Any:
        given.append({"heads": key.shape[1], "is_causal": is_causal})
        return query

    def of_2_15(query: Any, key: Any, value: Any, *sizes: Any, window_size: Any, enable_gqa: bool = False) -> Any:
        given.append({"heads": key.shape[1], "window_size": window_size, "enable_gqa": enable_gqa})
        return query

    for kernel in (of_2_10, of_2_15):
        flat_attention._kernel_of_torch(kernel)(
            tokens, tokens[:, :1], tokens[:, :1], texts=texts, scale=None, window=CAUSAL
        )
    assert given == [{"heads": 2, "is_causal": True}, {"heads": 1, "window_size": (4, 0), "enable_gqa": True}]


def two_texts() -> tuple[FlatTexts, Any]:
    """Texts of 4 tokens, and states of theirs."""
    texts = flattened([{"input_ids": np.zeros(4, dtype=np.int32)}] * 2, torch.device("cpu"))
    return texts, torch.randn(8, 2, 16)


def test_the_flash_kernel_is_called_whatever_else_torch_has() -> None:
    """Given a torch that prefers cuDNN, which makes a plan for each shape, then it is not asked for it."""
    given: list[tuple[Any, bool, bool]] = []

    def newer(query: Any, key: Any, value: Any, *sizes: Any, window_size: tuple[int, int] = (-1, -1)) -> Any:
        cuda = torch.backends.cuda
        given.append((window_size, cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()))
        return value

    texts, tokens = two_texts()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    kernel = flat_attention._kernel_of_torch(newer)
    for window in (EVERYWHERE, (1, 1)):
        kernel(tokens, tokens, tokens, texts=texts, scale=None, window=window)
    assert given == [((4, 4), True, False), ((1, 1), True, False)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FLAT)
def test_the_kernel_of_torch_agrees_with_padding_on_a_gpu(
    family: str, precision: str, trunks: Callable[[str], Path], events: pytest.LogCaptureFixture
) -> None:
    kernel = kernel_for(torch.device("cuda"), torch.bfloat16)
    if kernel is None:
        pytest.skip("this torch has no varlen attention for this GPU")
    config = ModelConfig(spec=f"st:{trunks(family)}", modalities=("text",), precision=precision)
    embedder: Any = load(config, "cuda")
    assert embedder.cost is sum, events.messages[-1]
    left = np.concatenate([vectors_of(embedder, TEXTS) for _ in range(8)])
    right = np.concatenate([vectors_of(loaded(config.spec), TEXTS)] * 8)
    cosines = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() >= 0.999


@pytest.mark.gpu
@needs_gpu
def test_pinned_memory_is_not_written_before_it_is_copied() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    sent = []
    for number in range(20):
        busy = busy @ busy
        numbers = np.full(65_536 * (1 + number % 3), number, dtype=np.int32)
        sent += all_on_device([numbers], torch.device("cuda"))
    assert [(int(one.min()), int(one.max())) for one in sent] == [(n, n) for n in range(20)]
