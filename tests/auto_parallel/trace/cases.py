"""Small models in training mode, the arguments that they are traced with, and real steps of them."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.resnet import resnet18
from colossalai.model_zoo.vit import ViT, ViTConfig
from tests.nn.live_bytes import LiveBytes
from tests.tiers import further

VOCAB, SEQ = 50, 16
HIDDEN, HEADS, LAYERS = 32, 4, 2


def _ids() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def _images() -> dict[str, Tensor]:
    return {"images": torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def gpt2(attention: str = "sdpa", num_layers: int = LAYERS) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": num_layers, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": SEQ}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, attn_implementation=attention, loss_type="ForCausalLM", **sizes, **ends)
    )


def _sizes(attention: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN}
    return {
        **sizes,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "attn_implementation": attention,
        "max_position_embeddings": SEQ,
    }


def bert(attention: str = "sdpa") -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_sizes(attention)))


def llama(attention: str = "sdpa") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_sizes(attention)))


def zoo_gpt() -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_layers": LAYERS, "num_attention_heads": HEADS}
    return GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=SEQ, **sizes))


def vit() -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_layers": LAYERS, "num_attention_heads": HEADS}
    return ViT(ViTConfig(image_size=16, patch_size=4, num_classes=10, **sizes))


def resnet() -> nn.Module:
    return resnet18(num_classes=10, small_input=True, width=8)


Case = tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]

OF_TRANSFORMERS: dict[str, Case] = {
    f"{make.__name__}-{attention}": (partial(make, attention), _ids)
    for make in (gpt2, bert, llama)
    for attention in ("sdpa", "eager")
}
CASES: dict[str, Case] = {
    **OF_TRANSFORMERS,
    "zoo_gpt": (zoo_gpt, _ids),
    "vit": (vit, _images),
    "resnet": (resnet, _images),
}
FURTHER = ("gpt2-sdpa", "gpt2-eager", "bert-sdpa", "llama-eager", "vit")
IN_TIERS = [further(name) if name in FURTHER else name for name in CASES]


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in training mode and its arguments."""
    make, arguments = CASES[name]
    torch.manual_seed(0)
    return make().train(), arguments()


def run_forward(model: nn.Module, arguments: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Return what a model returns, and the tensors that a backward starts at: the loss or all outputs."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    result = model(**arguments, **({"use_cache": False} if takes_cache else {}))
    leaves = tree_leaves(dict(result) if hasattr(result, "to_tuple") else result)
    grown = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return result, [leaf for leaf in grown if leaf.numel() == 1][:1] or grown


def run_backward(starts: list[Tensor]) -> None:
    torch.autograd.backward(starts, [torch.ones_like(start) for start in starts])


def counted_bytes(model: nn.Module, arguments: dict[str, Any], *, with_param_grads: bool) -> tuple[int, int]:
    """Return the bytes that live after the forward of a real step, and the peak of the step.

    Args:
        model: The model; its gradients are set.
        arguments: Of its forward.
        with_param_grads: Whether the gradients of parameters are made in the step, or are there before.
    """
    model.zero_grad(set_to_none=True)
    grads = []
    if not with_param_grads:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            grads.append(param.grad)
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    with LiveBytes(*model.parameters(), *model.buffers(), *tensors, *grads) as live:
        result, starts = run_forward(model, arguments)
        after_forward = sum(live._sizes.values())
        run_backward(starts)
    del result
    return after_forward, live.peak
