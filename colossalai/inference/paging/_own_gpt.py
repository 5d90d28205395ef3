"""Adapter that gives the GPT of this package the call signature of transformers."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from colossalai.inference.paging._calls import current_call
from colossalai.tensor import spec_of

_GPT = "colossalai.model_zoo.gpt._model.GPT"


class GPTLogits(NamedTuple):
    """Output of `ServedGPT`; (1, rows, vocabulary)."""

    logits: Tensor


class ServedGPT(nn.Module):
    """A `GPT` with the interface of a model of transformers; it shares the parameters.

    Args:
        gpt: The model, unsharded.

    Raises:
        ValueError: `gpt` is sharded over ranks.
    """

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        cut = [
            name
            for name, param in gpt.named_parameters()
            if (spec := spec_of(param)) is not None and tuple(spec.shape) != tuple(param.shape)
        ]
        if cut:
            raise ValueError(
                f"{len(cut)} parameters of the GPT are cut over ranks ({cut[0]} is one): save it, and serve "
                "the saved model on ranks of its own (tp_size), as examples/gpt does"
            )
        self.gpt: Any = gpt
        self.training = gpt.training

    @property
    def config(self) -> Any:
        """Config of the model."""
        return self.gpt.config

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, use_cache: bool = False
    ) -> GPTLogits:
        """Return the logits of some tokens.

        Args:
            input_ids: (1, tokens).
            position_ids: (1, tokens); without a paged call 0, 1, ...
            logits_to_keep: (rows,) indices of the tokens whose logits are returned.
            use_cache: False: the cache is paged.

        Raises:
            ValueError: `gpt` is in training mode, and would draw dropout masks.
        """
        gpt = self.gpt
        if gpt.training:
            raise ValueError("the GPT is in training mode: call its eval() before it answers")
        if current_call() is None:
            return GPTLogits(gpt(input_ids).index_select(1, logits_to_keep))
        hidden = gpt.embedding.tokens(input_ids) + gpt.embedding.positions(position_ids[0])
        for block in gpt.blocks:
            hidden = block(hidden)
        return GPTLogits(gpt.head(gpt.norm(hidden).index_select(1, logits_to_keep)))


def as_served(model: nn.Module) -> nn.Module:
    """Return the module that serves a model in memory: itself, or a `ServedGPT` for a GPT of this package."""
    is_own = f"{type(model).__module__}.{type(model).__qualname__}" == _GPT
    return ServedGPT(model) if is_own else model
