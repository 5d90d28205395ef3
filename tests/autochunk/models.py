"""Small models and their arguments for tests of AutoChunk, in float64."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from colossalai.autochunk import _autochunk
from colossalai.autochunk._trace import GraphTrace
from colossalai.model_zoo.evoformer import Evoformer
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.vit import ViT, ViTConfig

SIZES = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}


class EagerBlock(nn.Module):
    """An encoder block with explicit scores, whose values are used again after the attention."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width) of the same."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, seq, 3, self.num_heads, -1)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norms[1](x))


def eager() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return blocks with explicit scores, and their arguments."""
    return nn.Sequential(*(EagerBlock() for _ in range(3))), {"input": random(2, 64, 32)}


def gpt() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a decoder, and its arguments."""
    config = GPTConfig(vocab_size=40, max_position_embeddings=96, **SIZES)
    return GPT(config), {"input_ids": torch.randint(0, 40, (2, 96))}


def vit() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a vision transformer, and its arguments."""
    return ViT(ViTConfig(image_size=40, patch_size=4, num_classes=10, **SIZES)), {
        "images": random(2, 3, 40, 40)
    }


def gpt2(attention: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the GPT-2 of transformers, and its arguments."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=40,
        n_positions=96,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 40, (2, 96)), "use_cache": False}


def evoformer() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return an Evoformer, and its arguments."""
    heads = {"msa_heads": 2, "msa_head_dim": 8, "pair_heads": 2, "pair_head_dim": 4}
    model = Evoformer(c_m=16, c_z=8, num_blocks=1, outer_dim=8, triangle_dim=8, **heads)
    exists = torch.arange(12) < 10
    return model, {
        "msa": random(1, 8, 12, 16),
        "pair": random(1, 12, 12, 8),
        "msa_mask": exists.expand(1, 8, 12),
        "pair_mask": (exists & exists[:, None])[None],
    }


def esmfold_trunk() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the trunk of ESMFold, with its structure module, and its arguments."""
    from transformers.models.esm.configuration_esm import StructureModuleConfig, TrunkConfig
    from transformers.models.esm.modeling_esmfold import EsmFoldingTrunk

    structure = StructureModuleConfig(
        **{"sequence_dim": 32, "pairwise_dim": 16, "ipa_dim": 4, "resnet_dim": 16, "num_heads_ipa": 2},
        **{"num_qk_points": 2, "num_v_points": 2, "num_blocks": 1, "num_resnet_blocks": 1},
    )
    config = TrunkConfig(
        **{"num_blocks": 1, "sequence_state_dim": 32, "pairwise_state_dim": 16},
        **{"sequence_head_width": 8, "pairwise_head_width": 4},
        structure_module=structure,
    )
    model, length = EsmFoldingTrunk(config).double(), 12
    arguments = {
        "seq_feats": random(1, length, 32),
        "pair_feats": random(1, length, length, 16),
        "true_aa": torch.randint(0, 20, (1, length)),
        "residx": torch.arange(length)[None],
        "mask": (torch.arange(length) < 10).double()[None],
        "no_recycles": 0,
    }
    with torch.no_grad():
        model.eval()(**arguments)  # registers buffers
    return model, arguments


def unet() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the U-Net of diffusers, and its arguments."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return model, {
        "sample": random(1, 4, 16, 16),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": random(1, 7, 16),
        "return_dict": False,
    }


def random(*shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Mapping[str, Any]]]] = {
    "eager": eager,
    "gpt": gpt,
    "vit": vit,
    "gpt2-eager": lambda: gpt2("eager"),
    "gpt2-sdpa": lambda: gpt2("sdpa"),
    "evoformer": evoformer,
    "esmfold": esmfold_trunk,
    "unet": unet,
}


def model_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in evaluation mode and in float64, and its arguments by name."""
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    for module in model.modules():  # layers whose outputs are 0 at first
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.3)
    return model.eval().double(), dict(arguments)


@contextmanager
def one_trace() -> Iterator[None]:
    """Let calls of `autochunk` within the block share one trace, which takes most of their time."""
    original = _autochunk.trace
    traced: list[GraphTrace] = []

    def first_trace(*args: Any) -> GraphTrace:
        traced[:] = traced or [original(*args)]
        module = traced[0].module
        return replace(traced[0], module=torch.fx.GraphModule(module, module.graph))

    with mock.patch.object(_autochunk, "trace", first_trace):
        yield
