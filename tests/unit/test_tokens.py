"""Token ids straight from the tokenizers library: the same as from the wrapper, which is asked beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from embq.worker.embedders.base import Truncated
from embq.worker.embedders.text.tokens import Tokens
from tests.support.lazy import lazy

transformers = lazy("transformers")
torch = lazy("torch")


TEXTS = [
    "one",
    "the quick brown fox jumps over the lazy dog",
    "a <pad> and a [MASK] in a text, and </s> too",
    "Ünïcödé 漢字 🙂\n\ttabs",
    "word " * 40,
    "x" * 9000,
    " " * 5000 + "word " * 3,
    ".",
]
LIMIT = 12


def word_pieces(cls_type: int = 0, text_type: int = 0) -> Tokenizer:
    """WordPiece with the template of BERT; each part of it has a token type."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    made.post_processor = processors.TemplateProcessing(
        single=f"[CLS]:{cls_type} $A:{text_type} [SEP]:{text_type}", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def byte_pairs() -> Tokenizer:
    """Byte-level BPE with the template of RoBERTa."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<mask>"]
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def bert(backend: Tokenizer, **options: Any) -> transformers.PreTrainedTokenizerFast:
    names = ["input_ids", "token_type_ids", "attention_mask"]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **special, **options)


def roberta(**options: Any) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(), pad_token="<pad>", cls_token="<s>", eos_token="</s>", **options
    )


TOKENISERS: dict[str, Callable[[], transformers.PreTrainedTokenizerFast]] = {
    "word pieces": lambda: bert(word_pieces()),
    "byte pairs": roberta,
    "types that are not 0": lambda: bert(word_pieces(cls_type=2, text_type=1)),
    "cut on the left": lambda: roberta(truncation_side="left"),
    "special tokens are text": lambda: roberta(split_special_tokens=True),
}


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("make", TOKENISERS.values(), ids=TOKENISERS.keys())
def test_padded_rows_are_what_the_wrapper_pads(
    make: Callable[[], transformers.PreTrainedTokenizerFast], limit: int | None
) -> None:
    wrapper = make()
    tokens = Tokens(wrapper, limit)
    padded = tokens.padded(tokens.rows(TEXTS), torch.device("cpu"))
    options = {"truncation": "longest_first", "max_length": limit} if limit else {}
    expected = wrapper(TEXTS, padding=True, return_tensors="pt", **options)
    assert set(padded) == set(expected) | {"attention_mask"}
    for name, values in padded.items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("make", TOKENISERS.values(), ids=TOKENISERS.keys())
def test_rows_tell_of_texts_that_lose_tokens(make: Callable[[], transformers.PreTrainedTokenizerFast]) -> None:
    wrapper = make()
    whole = [len(ids) for ids in wrapper(TEXTS)["input_ids"]]
    rows = Tokens(wrapper, LIMIT).rows(TEXTS)
    assert [isinstance(row, Truncated) for row in rows] == [length > LIMIT for length in whole]
    assert [len(row["input_ids"]) for row in rows] == [min(length, LIMIT) for length in whole]


def test_token_types_travel_only_where_some_are_not_zero() -> None:
    assert set(Tokens(bert(word_pieces())).rows(["one"])[0]) == {"input_ids"}
    typed = Tokens(bert(word_pieces(cls_type=2, text_type=1))).rows(["the fox"])[0]
    assert typed["token_type_ids"].tolist() == [2] + [1] * (len(typed["input_ids"]) - 1)


def test_a_wrapper_with_an_override_is_called() -> None:
    class Shouting(transformers.PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
            texts = [one.upper() for one in text] if isinstance(text, list) else text
            return super()._encode_plus(texts, *args, **options)

    backend, texts = byte_pairs(), ["word " * 20]
    shouting = Shouting(tokenizer_object=backend, pad_token="<pad>")
    quiet = Tokens(transformers.PreTrainedTokenizerFast(tokenizer_object=backend), LIMIT).rows(texts)[0]
    loud = Tokens(shouting, LIMIT).rows(texts)[0]
    assert isinstance(loud, Truncated)
    assert loud["input_ids"].tolist() == shouting(texts, truncation=True, max_length=LIMIT)["input_ids"][0]
    assert quiet["input_ids"].tolist() != loud["input_ids"].tolist()


def test_a_tokeniser_in_python_is_asked() -> None:
    rows = Tokens(transformers.CanineTokenizer(), LIMIT).rows(["ab", "word " * 20])
    assert [len(row["input_ids"]) for row in rows] == [4, LIMIT]
