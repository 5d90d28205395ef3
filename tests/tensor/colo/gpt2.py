"""A small GPT-2 of transformers, and the documented recipe that cuts it."""

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from colossalai.tensor import ComputePattern, ComputeSpec, ProcessGroup, ShardSpec, spec_of

WIDTH, VOCAB = 32, 64


def build(**options: Any) -> nn.Module:
    """Return the model in float64, without dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=16,
        vocab_size=VOCAB,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
    return GPT2LMHeadModel(config).double()


def cut(model: nn.Module, group: ProcessGroup) -> None:
    """Cut the model as the documents do: every ColoParameter of it gets a process group, and many a spec."""

    def along(param: Any, dim: int) -> None:
        if param.process_group.tp_world_size() == 1:
            param.set_process_group(group)
        param.set_tensor_spec(ShardSpec([dim], [group.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))

    for name, module in model.named_modules():
        for own_name, param in module.named_parameters(recurse=False):
            param.set_process_group(group)
            if "mlp.c_fc" in name:
                along(param, -1)
                param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in name:
                if "weight" in own_name:
                    along(param, 0)
            elif "wte" in name or "wpe" in name or "c_attn" in name or "c_proj" in name:
                along(param, -1)


def batch(num_parts: int, part: int) -> torch.Tensor:
    """Return a part of the tokens: (4, 12) in all."""
    ids = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
    return ids.chunk(num_parts)[part]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@functools.cache
def trained_alone(steps: int = 3, **options: Any) -> tuple[list[float], nn.Module, dict[str, torch.Tensor]]:
    """Return the losses of one process, the model, and the gradients of the last step; only to be read."""
    model = build(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(1, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return losses, copy.deepcopy(model), grads


def slice_like(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a whole tensor, cut as a parameter is."""
    spec = spec_of(param)
    return whole if spec is None else spec.slice_of(whole)
