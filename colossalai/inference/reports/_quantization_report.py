"""Effect of quantization on a model: its size before and after, and the change of its logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.inference._load import EngineOptions, ModelSource, load_model, load_tokenizer
from colossalai.inference.products import QuantizationWay, QuantizedLinear, product_parts

_RANDOM_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """Effect of quantization on a model.

    Attributes:
        way: Format of the quantized weights.
        bytes_before: Size of all parameters and buffers; tied ones count once.
        bytes_after: The same for the quantized model.
        product_bytes_before: Size of the linear layers alone.
        product_bytes_after: The same for the quantized model.
        largest_error: Largest difference of a logit.
        largest_logit: Largest absolute logit before.
        same_choices: Share of tokens whose most likely successor stays the same.
        kept: Names of linear layers that are not quantized.
    """

    way: str
    bytes_before: int
    bytes_after: int
    product_bytes_before: int
    product_bytes_after: int
    largest_error: float
    largest_logit: float
    same_choices: float
    kept: tuple[str, ...]

    def describe(self) -> str:
        """Return a summary in one line."""
        return (
            f"{self.way}: {self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB "
            f"({self.bytes_after / self.bytes_before:.2f}x; products "
            f"{self.product_bytes_after / self.product_bytes_before:.2f}x), logits of up to "
            f"{self.largest_logit:.3g} move by up to {self.largest_error:.3g}, {self.same_choices:.0%} of "
            f"the next tokens stay; {len(self.kept)} linear layers are kept"
        )


@torch.inference_mode()
def quantization_report(
    model: ModelSource,
    quantize: str,
    *,
    dtype: str = "auto",
    checkpoint: str | None = None,
    text: str | None = None,
) -> QuantizationReport:
    """Compare a model with its quantized form on a text; the two are loaded one after the other.

    Args:
        model: A folder, or a name or function of `colossalai.inference.models`.
        quantize: Format of the quantized weights; see `EngineOptions`.
        dtype: Dtype of the unquantized model.
        checkpoint: File or folder of the values, if not in the model's own folder.
        text: Input of both; None for random tokens.

    Raises:
        ValueError: `model` is in memory, has no tokenizer for `text`, or cannot be quantized in this format.
    """
    if isinstance(model, nn.Module):
        raise ValueError("a model in memory would be changed: name its folder")
    tokens: Tensor | None = None
    if text is not None:
        tokenizer = load_tokenizer(model, None)
        if tokenizer is None:
            raise ValueError("the model has no tokenizer for the text: leave it out, for random tokens")
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
    plain = load_model(model, EngineOptions(dtype=dtype, checkpoint=checkpoint))
    tokens = _random_tokens(plain) if tokens is None else tokens
    before = _logits(plain, tokens)
    bytes_before, products_before = _bytes(plain), sum(_bytes(layer) for _, layer in _products(plain))
    del plain
    options = EngineOptions(dtype=dtype, checkpoint=checkpoint, quantize=quantize)
    quantized = load_model(model, options)
    after = _logits(quantized, tokens)
    return QuantizationReport(
        way=QuantizationWay.of(quantize).name,
        bytes_before=bytes_before,
        bytes_after=_bytes(quantized),
        product_bytes_before=products_before,
        product_bytes_after=sum(_bytes(layer) for _, layer in _products(quantized)),
        largest_error=float((after - before).abs().max()),
        largest_logit=float(before.abs().max()),
        same_choices=float((after.argmax(-1) == before.argmax(-1)).double().mean()),
        kept=tuple(name for name, layer in _products(quantized) if not isinstance(layer, QuantizedLinear)),
    )


def _random_tokens(model: nn.Module) -> Tensor:
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, int(config.vocab_size), (1, _RANDOM_TOKENS), generator=generator)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.double()


def _products(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, layer) for name, layer in model.named_modules() if product_parts(layer) is not None]


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
