"""Small models to be cut, with data for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossalai.model_zoo.bert import Bert, BertConfig
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.vit import ViT, ViTConfig

BATCH, SEQ, VOCAB = 4, 8, 31


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: Builds it, the same one each time.
        data: Its data.
        output: The tensor to compare in what it returns.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], Any]
    output: Callable[[Any], torch.Tensor] = lambda output: output.logits


def tokens() -> dict[str, torch.Tensor]:
    """Return token ids, the last three of one sequence being padding."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator), "attention_mask": mask}


def images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)}


def hugging_face(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a tiny model of that class, in float64, without dropout."""

    def build() -> nn.Module:
        import transformers

        sizes = dict(hidden_size=16, num_hidden_layers=5, num_attention_heads=2, **_OPTIONS[name], **changes)
        config = getattr(transformers, _CONFIGS[name])(**sizes)
        torch.manual_seed(1)
        # Weights as drawn are so small that a wrong mask would hardly show.
        model = getattr(transformers, name)(config).double()
        with torch.no_grad():
            for param in dict.fromkeys(model.parameters()):
                param.add_(0.2 * torch.randn_like(param))
        return model

    return build


_HF_TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 16}
_OPTIONS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": dict(_HF_TEXT, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "BertForMaskedLM": dict(
        _HF_TEXT, intermediate_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    ),
    "ViTForImageClassification": {
        "image_size": 8,
        "patch_size": 4,
        "intermediate_size": 32,
        "hidden_dropout_prob": 0,
    },
    "OPTForCausalLM": dict(_HF_TEXT, ffn_dim=32, dropout=0, word_embed_proj_dim=8),
    "LlamaForCausalLM": dict(_HF_TEXT, intermediate_size=32),
    "BloomForCausalLM": {"vocab_size": VOCAB},
    "GPTNeoXForCausalLM": dict(_HF_TEXT, intermediate_size=32, bos_token_id=0, eos_token_id=0),
    "PhiForCausalLM": dict(_HF_TEXT, intermediate_size=32, qk_layernorm=True, bos_token_id=0, eos_token_id=0),
}
_CONFIGS = {
    "GPT2LMHeadModel": "GPT2Config",
    "BertForMaskedLM": "BertConfig",
    "ViTForImageClassification": "ViTConfig",
    "OPTForCausalLM": "OPTConfig",
    "LlamaForCausalLM": "LlamaConfig",
    "BloomForCausalLM": "BloomConfig",
    "GPTNeoXForCausalLM": "GPTNeoXConfig",
    "PhiForCausalLM": "PhiConfig",
}


SHAPE = {"hidden_size": 16, "num_layers": 5, "num_attention_heads": 2}
TEXT = dict(SHAPE, vocab_size=VOCAB, max_position_embeddings=16)


def seeded(build):
    """Return a function that builds the same model each time, and leaves the same random state.

    So dropout, which is drawn in the order of the blocks, is the same in the whole model and in its stages.
    """

    def built():
        torch.manual_seed(0)
        return build().double()

    return built


ZOO = {
    "gpt": Case(seeded(lambda: GPT(GPTConfig(**TEXT))), tokens, lambda output: output),
    "bert": Case(seeded(lambda: Bert(BertConfig(**TEXT))), tokens, lambda output: output),
    "vit": Case(
        seeded(lambda: ViT(ViTConfig(image_size=8, patch_size=4, num_classes=5, **SHAPE))),
        lambda: {"images": images()["pixel_values"]},
        lambda output: output,
    ),
}
