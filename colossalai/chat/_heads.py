"""A value head on a causal language model: reward models and critics.

A reward model is a language model whose vocabulary head is replaced by one linear layer with one output, read
at the last token of a text (Stiennon et al., 2009.01325, whose initial standard deviation of 1 / sqrt(d + 1)
is kept). The names of its parameters are those of the `*ForSequenceClassification` of transformers with one
label, so that a saved one opens there and one of theirs opens here.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.booster import has_adapters
from colossalai.pipeline import ModelStage
from colossalai.runtime import ModelWrapper

CLASSIFIER = "ForSequenceClassification"
"""What transformers calls a model with a head of labels, behind the name of its family."""


class ValueModel(nn.Module):
    """A language model that gives a number for each token.

    Args:
        trunk: The model without a head: it returns hidden states, (batch, length, hidden).
        trunk_name: The attribute that holds it: `base_model_prefix` of its class.
        config: That of the model, with one label.
        width: Features of a hidden state; None: `hidden_size` of the config.
    """

    main_input_name = "input_ids"  # as transformers' models say it: whoever makes a sample run asks for it

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
            attention_mask: (batch, length), 0 where a row is filled up.

        Returns:
            (batch, length).
        """
        trunk = getattr(self, self.trunk_name)
        hidden = trunk(input_ids=input_ids, attention_mask=attention_mask)[0]  # (batch, length, hidden)
        values: Tensor = self.score(hidden)
        return values.squeeze(-1).clone()  # FSDP hooks on the output, which must not be a view


def with_value_head(model: nn.Module) -> ValueModel:
    """Return a reward model or critic that has the layers of a causal language model.

    The layers are those of `model`, not copies: both share their parameters. Give it a copy if it is to go on
    by itself.

    Args:
        model: A causal language model of transformers.

    Raises:
        ValueError: `model` has no `base_model_prefix` or no `hidden_size` in its config, so is none of
            transformers; or it has a head of labels, has adapters, or has been boosted.
    """
    family = type(model).__name__
    if isinstance(model, ModelWrapper):
        raise ValueError(f"{family} has been boosted: put a value head on the model before that")
    if has_adapters(model):
        raise ValueError(
            f"{family} has adapters: put the value head on the model that they are for, and adapters on what "
            "comes of it, with modules_to_save=['score']; or merge them before"
        )
    if family.endswith(CLASSIFIER):
        raise ValueError(f"{family} has a head of labels: one with one label opens by load_reward_model")
    name = getattr(model, "base_model_prefix", "")
    config: Any = getattr(model, "config", None)
    if not name or not hasattr(model, name) or not hasattr(config, "hidden_size"):
        raise ValueError(
            f"{family} is no causal language model of transformers: a value head is put on "
            "what its base_model_prefix names, for a hidden_size that its config has"
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
    """Return whether a model is one of `with_value_head`, as it is, boosted, in stages or with adapters."""
    parts = (part.model if isinstance(part, ModelStage) else part for part in model.modules())
    return any(isinstance(part, ValueModel) for part in parts)


def last_values(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Return of each row the value at its last token.

    Args:
        values: (batch, length).
        attention_mask: (batch, length), 1 where there is a token; rows are filled up on the right.

    Returns:
        (batch,).
    """
    last = attention_mask.sum(dim=1).clamp(min=1) - 1
    return torch.gather(values, 1, last.long().unsqueeze(1)).squeeze(1)
