"""Tiny tokenizers of the kinds that language models have."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["the quick brown fox jumps over the lazy dog, and the dogs jump. ", "où ça, größer; 日本語のテキスト"]
SPECIAL = ["<s>", "</s>", "<unk>", "<reserved>"]  # the last one is special, and has no role


def whole(tokenizer):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def byte_level():
    """As GPT-2 and Llama 3: each byte is a character of the vocabulary's alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return whole(tokenizer)


@cache
def byte_fallback():
    """As Llama 2: spaces are marks, the first one is stripped, and bytes stand for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        TEXT[:1], trainers.BpeTrainer(vocab_size=320, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    )
    # A trainer makes special tokens of the bytes; in a model's own file they are plain tokens.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    return whole(Tokenizer.from_str(json.dumps(state)))


@cache
def metaspace():
    """As T5 and other SentencePiece models without bytes: the decoder turns marks into spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return whole(tokenizer)
