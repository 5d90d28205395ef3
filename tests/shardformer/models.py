"""Small models of transformers, built from configs."""

from typing import Any

from torch import Tensor, nn

VOCAB = 25  # which two ranks do not divide


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    """Return a GPT-2 with tied embedding and head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": VOCAB, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**rates, **sizes, **options}))


def gpt2_of_four_blocks() -> nn.Module:
    """Return a deeper one."""
    return gpt2(n_layer=4)


def llama(**options: Any) -> nn.Module:
    """Return a Llama whose head is not tied, with two queries to a key."""
    return _decoder("Llama", num_hidden_layers=2, num_attention_heads=4, **options)


def mistral() -> nn.Module:
    """Return a Mistral."""
    return _decoder("Mistral")


def qwen2() -> nn.Module:
    """Return a Qwen2, whose queries, keys and values have biases, with tied embedding and head."""
    return _decoder("Qwen2", tie_word_embeddings=True)


def opt() -> nn.Module:
    """Return an OPT, whose vocabulary and positions are in the decoder, with tied embedding and head."""
    return _decoder("OPT", ffn_dim=12, word_embed_proj_dim=8, dropout=0.0, pad_token_id=1)


def _decoder(family: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def bert() -> nn.Module:
    """Return a BERT with the head of masked language models."""
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def bert_decoder(**options: Any) -> nn.Module:
    """Return a BERT that decodes, with cross-attention."""
    from transformers import BertLMHeadModel

    return BertLMHeadModel(_bert_config(is_decoder=True, add_cross_attention=True, **options))


def _bert_config(**options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )


def language_loss(output: Any, labels: Tensor) -> Tensor:
    """Return the loss of the next tokens."""
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
