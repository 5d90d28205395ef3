"""Tiny models of transformers, with weights that make texts which differ from prompt to prompt."""

import torch
from torch import nn

VOCAB = 200
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny(family: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    """Return a model of a family; the same values each time."""
    import transformers

    sizes: dict[str, object] = {**_SIZES, **_NO_ENDS}
    if family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"):
        sizes["num_key_value_heads"] = 2
    if family == "Qwen3":
        sizes["head_dim"] = 8
    if family == "GPT2":
        sizes = {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "initializer_range": 0.3,
            **_NO_ENDS,
        }
    if family == "OPT":
        del sizes["intermediate_size"], sizes["initializer_range"]
        sizes |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}
    if family == "Bloom":
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "n_layer": 4,
            "n_head": 4,
            "initializer_range": 0.3,
            **_NO_ENDS,
        }
    config = getattr(transformers, f"{family}Config")(**sizes | more)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(config).to(dtype).eval()
    return model


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


MIXED = (5, 60, 17, 33, 8, 120, 1, 64, 3, 3, 9, 77, 20, 21, 22, 40)
"""Lengths of the prompts of a batch of 16."""


def greedy(model: nn.Module, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """Return what `generate` of transformers answers."""
    given = torch.tensor([prompt])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=num_tokens, do_sample=False
    )
    return tuple(made[0, len(prompt) :].tolist())
