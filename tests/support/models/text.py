"""Tiny text models with random weights, in folders as the libraries save them, one for each family of architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.lazy import lazy

transformers = lazy("transformers")
torch = lazy("torch")


WIDTH = 32
"""Hidden size of all trunks."""

POSITIONS = 64
"""Tokens that each trunk holds."""

CORPUS = (
    "the quick brown fox jumps over the lazy dog while an embedding of a text is computed",
    "return the base two logarithm of a number; raise an error where the number is negative",
    "Straße, naïve café, Ελληνικά, русский текст, 漢字かな交じり文, العربية, עברית, हिन्दी, emoji 🙂🚀",
)


def word_pieces(**options: Any) -> transformers.PreTrainedTokenizerFast:
    """BERT's kind: lower case, [CLS] before and [SEP] after each text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=POSITIONS, **{**named, **options}
    )


def sentence_pieces(*, begins: bool, **options: Any) -> transformers.PreTrainedTokenizerFast:
    """XLM-R's kind, with <s> before and </s> after each text, or T5's with only </s>; any byte is a token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if begins else "$A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=POSITIONS, **{**named, **options}
    )


def bytes_pieces(**options: Any) -> transformers.PreTrainedTokenizerFast:
    """GPT's kind: bytes, no token before or after a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    named = {"eos_token": "<|end|>", "pad_token": "<|end|>", "model_max_length": POSITIONS}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**named, **options})


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": POSITIONS,
        **more,
    }


def _bert() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import BertConfig, BertModel

    tokenizer = word_pieces()
    return BertModel(BertConfig(vocab_size=len(tokenizer), **_sizes())), tokenizer


def _distilbert() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import DistilBertConfig, DistilBertModel

    tokenizer = word_pieces(model_input_names=["input_ids", "attention_mask"])
    size = {"dim": WIDTH, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "max_position_embeddings": POSITIONS}
    return DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), **size)), tokenizer


def _mpnet() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import MPNetConfig, MPNetModel

    tokenizer = sentence_pieces(begins=True)
    size = _sizes(max_position_embeddings=POSITIONS + 2)  # two positions are no token's, as in RoBERTa
    return MPNetModel(MPNetConfig(vocab_size=len(tokenizer), **size)), tokenizer


def _xlm_roberta() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import XLMRobertaConfig, XLMRobertaModel

    tokenizer = sentence_pieces(begins=True)
    size = _sizes(max_position_embeddings=POSITIONS + 2, pad_token_id=1, type_vocab_size=1)
    return XLMRobertaModel(XLMRobertaConfig(vocab_size=len(tokenizer), **size)), tokenizer


def _modernbert() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import ModernBertConfig, ModernBertModel

    tokenizer = word_pieces(model_input_names=["input_ids", "attention_mask"])
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    # A window that is shorter than the texts, so that both kinds of attention are there.
    size = _sizes(local_attention=16, global_attn_every_n_layers=2, **special)
    return ModernBertModel(ModernBertConfig(vocab_size=len(tokenizer), **size)), tokenizer


def _t5() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import T5Config, T5EncoderModel

    tokenizer = sentence_pieces(begins=False)
    size = {"d_model": WIDTH, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "pad_token_id": 1}
    # As T5 v1.1 has them: the weights of a random T5 would give nearly the same vector for each text otherwise.
    return T5EncoderModel(T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **size)), tokenizer


def _qwen2() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = bytes_pieces(padding_side="left")
    size = _sizes(num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **size)), tokenizer


def _gpt2() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = bytes_pieces(pad_token=None)
    size = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)), tokenizer


TRUNKS: dict[str, Callable[[], tuple[Any, transformers.PreTrainedTokenizerFast]]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "xlm-roberta": _xlm_roberta,
    "modernbert": _modernbert,
    "t5": _t5,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
}
"""Family -> a trunk with random weights and its tokeniser. The last two are causal; the last one has no pad token."""


def save_trunk(
    folder: Path, family: str, *, seed: int = 0, tokenizer: transformers.PreTrainedTokenizerFast | None = None
) -> Path:
    """A folder as transformers saves it.

    Args:
        tokenizer: in place of the family's own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk, own = TRUNKS[family]()
        _widen(trunk)
    trunk.save_pretrained(folder)
    (tokenizer or own).save_pretrained(folder)
    return folder


def save_sentence_model(folder: Path, modules: Sequence[Any], **options: Any) -> Path:
    """A folder as sentence-transformers saves it; modules that a folder of a trunk begins are given as they are."""
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(modules=list(modules), device="cpu", **options).save(str(folder), create_model_card=False)
    return folder


def _widen(trunk: Any) -> None:
    """Larger weights than those a training begins with, by which all texts would have nearly the same vector."""
    with torch.no_grad():
        for weights in trunk.parameters():
            if weights.ndim == 2:
                weights.copy_(torch.randn(weights.shape) * 0.2)
