"""Value head on a causal language model: reward models and critics.

A reward model is a language model whose language model head is replaced by one linear layer with one output,
read at the last token of a text (Stiennon et al., 2009.01325, with their initial standard deviation of
1 / sqrt(d + 1)). Its parameters have the names of transformers' `*ForSequenceClassification` with one label,
so saved models can be exchanged in both directions.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.booster import has_adapters
from colossalai.pipeline import ModelStage
from colossalai.runtime import ModelWrapper

CLASSIFIER = "ForSequenceClassification"
"""Suffix of transformers' class names for models with a classification head."""


class ValueModel(nn.Module):
    """A language model with one output per token.

    Args:
        trunk: The model without a head: it returns hidden states, (batch, length, hidden).
        trunk_name: Name of its attribute here: `base_model_prefix` of its class.
        config: The config of the model, with one label.
        width: Number of features of a hidden state. Default: `hidden_size` of the config.
    """

    main_input_name = "input_ids"  # attribute of transformers' models, for code that builds sample inputs

    def __init__(self, trunk: nn.Module, *, trunk_name: str, config: Any, width: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.trunk_name = trunk_name
        setattr(self, trunk_name, trunk)
        like = next(trunk.parameters())
        width = config.hidden_size if width is None else width
        self.score = nn.Linear(width, 1, bias=False, device=like.device, dtype=like.dtype)
        nn.init.normal_(self.score.weight, std=(width + 1) ** -0.5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the value of each token.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, length), 0 for padding.

        Returns:
            (batch, length).
        """
        trunk = getattr(self, self.trunk_name)
        hidden = trunk(input_ids=input_ids, attention_mask=attention_mask)[0]  # (batch, length, hidden)
        values: Tensor = self.score(hidden)
        return values.squeeze(-1).clone()  # FSDP hooks on the output, which must not be a view


def with_value_head(model: nn.Module) -> ValueModel:
    """Return a reward model or critic with the layers of a causal language model.

    The layers are those of `model`, not copies: both share their parameters. Pass a copy to train them
    separately.

    Args:
        model: A causal language model of transformers.

    Raises:
        ValueError: `model` has no `base_model_prefix`, or no `hidden_size` in its config, so it is not of
            transformers; or it has a classification head, has adapters, or has been boosted.
    """
    family = type(model).__name__
    if isinstance(model, ModelWrapper):
        raise ValueError(f"{family} has been boosted: put a value head on the model before that")
    if has_adapters(model):
        raise ValueError(
            f"{family} has adapters: put the value head on the base model, and adapters on the result, with "
            "modules_to_save=['score']; or merge them before"
        )
    if family.endswith(CLASSIFIER):
        raise ValueError(f"{family} has a head of labels: one with one label opens by load_reward_model")
    name = getattr(model, "base_model_prefix", "")
    config: Any = getattr(model, "config", None)
    if not name or not hasattr(model, name) or not hasattr(config, "hidden_size"):
        raise ValueError(
            f"{family} is not a causal language model of transformers: a value head needs the base model of "
            "its base_model_prefix, and a hidden_size in its config"
        )
    config = copy.deepcopy(config)
    config.num_labels = 1
    config.use_cache = False
    config.architectures = [family.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + CLASSIFIER]
    vocabulary: Any = getattr(model, "get_output_embeddings", lambda: None)()
    # OPT-350M projects its hidden states to the width of its embeddings, which the vocabulary's head reads.
    width = None if vocabulary is None else vocabulary.weight.shape[1]
    return ValueModel(getattr(model, name), trunk_name=name, config=config, width=width)


def has_value_head(model: nn.Module) -> bool:
    """Return whether a model is one of `with_value_head`, also boosted, in stages or with adapters."""
    parts = (part.model if isinstance(part, ModelStage) else part for part in model.modules())
    return any(isinstance(part, ValueModel) for part in parts)


def last_values(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the value at the last token of each row.

    Args:
        values: (batch, length).
        attention_mask: (batch, length), 1 for tokens; rows are padded on the right.

    Returns:
        (batch,).
    """
    last = attention_mask.sum(dim=1).clamp(min=1) - 1
    return torch.gather(values, 1, last.long().unsqueeze(1)).squeeze(1)
