"""Numbers of parameters of the models of RLHF on a rank, counted on the meta device without memory.

Models are built from a transformers config and cut over tensor-parallel ranks by the code that trains them,
so the counts are those of training. A critic and a reward model are the layers of the language
model with one output of `hidden` weights instead of the vocabulary. An adapter of rank r (LoRA,
2106.09685) adds r (inputs + outputs) to each matrix of a linear layer; a tensor-parallel rank has
the same share of it as of the two sides of its slice of the matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.shardformer import shard_model
from colossalai.zero.gemini import search_chunk_configuration

_CHUNK_RANGE_MB, _CHUNK_INTERVAL = 32, 1024  # the defaults of GeminiPlugin


@dataclass(frozen=True, kw_only=True)
class ParamNumbers:
    """Numbers of the parameters of a model on a rank, before ZeRO cuts them.

    Attributes:
        trained: Number of trained parameters.
        frozen: Number of other parameters.
        in_two_chunks: Elements of the two largest chunks of Gemini.
    """

    trained: int
    frozen: int = 0
    in_two_chunks: int = 0

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.trained + self.frozen

    def as_frozen(self) -> "ParamNumbers":
        """Return the numbers of the same model without training."""
        return replace(self, trained=0, frozen=self.total)


@dataclass(frozen=True, kw_only=True)
class RlhfNumbers:
    """Numbers of the parameters of a rank, and the size of a token in a cache.

    Attributes:
        policy: Numbers of the language model.
        value: Numbers of the same model with a value head: a critic, a reward model.
        whole_policy: Number of all parameters of the language model, without tensor parallelism.
        whole_value: The same for the model with a value head.
        cached_per_token: Elements of keys and values of a token.
    """

    policy: ParamNumbers
    value: ParamNumbers
    whole_policy: int
    whole_value: int
    cached_per_token: int


def numbers_of_module(module: nn.Module) -> ParamNumbers:
    """Return the numbers of a model on a rank; shared parameters count once."""
    params = list(module.parameters())
    trained = sum(param.numel() for param in params if param.requires_grad)
    return ParamNumbers(trained=trained, frozen=sum(param.numel() for param in params) - trained)


def rlhf_numbers(config: Any, *, tp: int = 1, lora_rank: int = 0) -> RlhfNumbers:
    """Return the numbers of the models of RLHF on a rank.

    Args:
        config: Config of a causal language model of transformers.
        tp: Number of ranks that share each layer.
        lora_rank: Rank of the adapters of all linear layers; then only these and value heads are trained. 0
            for no adapters.

    Raises:
        ValueError: `tp` ranks cannot share the layers of the model.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    policy = _build(AutoModelForCausalLM.from_config, config)
    trunk = _build(AutoModel.from_config, config)
    whole_policy, whole_trunk = (numbers_of_module(model).total for model in (policy, trunk))
    if tp > 1:
        for model in (policy, trunk):
            if not shard_model(model, Mesh({"tp": tp}, rank=0)):
                raise ValueError(f"{type(policy).__name__} has no layers that {tp} ranks could share")
    return RlhfNumbers(
        policy=_numbers(policy, config, lora_rank=lora_rank, has_value_head=False),
        value=_numbers(trunk, config, lora_rank=lora_rank, has_value_head=True),
        whole_policy=whole_policy,
        whole_value=whole_trunk + config.hidden_size,
        cached_per_token=cached_per_token(config),
    )


def cached_per_token(config: Any) -> int:
    """Return the elements of keys and values that a token has in the cache of an engine."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size)


def _build(build: Callable[..., nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        return build(config)


def _numbers(model: nn.Module, config: Any, *, lora_rank: int, has_value_head: bool) -> ParamNumbers:
    head = config.hidden_size if has_value_head else 0
    found = numbers_of_module(model)
    groups, *_ = search_chunk_configuration(model, _CHUNK_RANGE_MB, _CHUNK_INTERVAL)
    chunks = sorted((chunk.size for group in groups for chunk in group.packing.chunks), reverse=True)
    if lora_rank == 0:
        return ParamNumbers(trained=found.total + head, in_two_chunks=sum(chunks[:2]))
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    layers: list[Any] = [each for each in model.modules() if each is not outputs and _is_linear(each)]
    adapters = sum(lora_rank * sum(layer.weight.shape) for layer in layers)
    return ParamNumbers(trained=adapters + head, frozen=found.total, in_two_chunks=sum(chunks[:2]))


def _is_linear(module: Any) -> bool:
    """Return whether peft adapts a layer when all linear layers are selected."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return not isinstance(module, nn.Embedding) and bool(kinds & {"Linear", "Conv1D", "LinearShard"})
