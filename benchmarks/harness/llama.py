"""Random Llama and tokenizer for the benchmarks of serving."""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(
    *,
    vocab: int,
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    dtype: str = "float32",
) -> LlamaForCausalLM:
    """Return a model with the weights of seed 0, in evaluation mode; no token ends its texts.

    Args:
        vocab: Number of tokens.
        hidden: Width of the residual stream.
        layers: Number of blocks.
        intermediate: Inner features of a feed-forward.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        dtype: Torch's name of the weights' dtype.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def llama_parser(description: str | None, **more: int) -> argparse.ArgumentParser:
    """Return a parser with the sizes of the model, further integers, and `--json`.

    Args:
        description: Description of the benchmark.
        more: Names of further options, with their defaults.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"vocab": 8192, "hidden": 640, "layers": 12, "intermediate": 1728}
    for name, default in {**sizes, **more}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return parser


def llama_of(args: argparse.Namespace, **others: Any) -> LlamaForCausalLM:
    """Return the model of the options: float32, heads of 64 features, half as many key and value heads.

    Args:
        args: Arguments parsed by `llama_parser`.
        others: Arguments of `random_llama` that replace those of `args`.
    """
    heads = args.hidden // 64
    sizes = {"vocab": args.vocab, "hidden": args.hidden, "layers": args.layers}
    sizes |= {"intermediate": args.intermediate, "heads": heads, "kv_heads": max(heads // 2, 1)}
    return random_llama(**(sizes | others))


def byte_tokenizer(vocab: int) -> Any:
    """Return a tokenizer of bytes; its further tokens are words that occur in no text.

    Args:
        vocab: Number of tokens, at least 258.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"word{number}" for number in range(len(names), vocab)]
    inner = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
