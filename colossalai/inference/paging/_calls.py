"""Paged calls of a model: during one forward, its attention layers read and write cache blocks.

Models of transformers look up the attention function of their config in an interface. During a paged call
the config names ours; before and after it the model is unchanged, so that the same object can train or run
`generate` between two steps of an engine. Other threads that call it in the meantime get the function of the
original config: a context variable marks the thread of a paged call.

[Note: check of a served model]
A model that runs through the interface may still be wrong: a layer can keep state outside the cache (a
convolution, a recurrence), and a sequence would silently continue from the state of another one. So
`check_model` compares two results for the same tokens: one plain forward, and paged calls that cut them into
chunks.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.inference.paging._adapter_rows import AdapterRows
from colossalai.inference.paging._attention import AttentionOptions, PagedStep
from colossalai.inference.paging._cache import LayerCache, LayerShape

_PREFIX = "colossalai_paged_"
PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layer types of configs whose attention is paged."""

# Arguments of attention functions without meaning or effect in a paged call.
_HARMLESS = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "layer_idx", "logits_to_keep",
        "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states",
        "output_router_logits", "past_key_value", "past_key_values", "position_embeddings", "position_ids",
        "return_dict", "use_cache",
    }
)  # fmt: skip


@dataclass(frozen=True)
class PagedCall:
    """One step on one rank.

    Attributes:
        step: The tokens, and the blocks of their sequences.
        caches: Cache of each attention layer.
        adapted: Rows of the tokens by adapter; None without adapters.
        adapted_logits: Rows of the logits by adapter, if the model computes only selected logits.
    """

    step: PagedStep
    caches: Mapping[nn.Module, LayerCache]
    adapted: AdapterRows | None = None
    adapted_logits: AdapterRows | None = None

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention of a layer; see `PagedStep.attend`."""
        return self.step.attend(self.caches[layer], query, key, value, options)


class ShapeProbe:
    """A call that records the cache shapes of a model's attention layers, with zeros as results.

    Attributes:
        found: Cache shape of each layer, in order of execution.
        asked: Attention options of each layer.
    """

    def __init__(self) -> None:
        self.found: dict[nn.Module, LayerShape] = {}
        self.asked: dict[nn.Module, AttentionOptions] = {}

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Record the shapes; return zeros instead of attention."""
        self.asked[layer] = options
        self.found[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype)
        return query.new_zeros(*query.shape[:2], value.shape[2])


# Engines of one model, or of models with a shared config, must not replace each other's function in it.
_one_at_a_time = threading.RLock()
_call: ContextVar[PagedCall | ShapeProbe | None] = ContextVar("paged call", default=None)


def current_call() -> PagedCall | ShapeProbe | None:
    """Return the paged call of this thread."""
    return _call.get()


def adapter_rows(*, of_logits: bool = False) -> AdapterRows | None:
    """Return the rows by adapter of this thread's paged call; None if no row has one.

    Args:
        of_logits: Whether to return the rows of the logits instead of those of all tokens.
    """
    call = _call.get()
    if not isinstance(call, PagedCall):
        return None
    return call.adapted_logits if of_logits else call.adapted


class PagedModel:
    """A model with support for paged calls.

    Args:
        model: A causal language model of transformers, or a stage of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        configs = {
            id(part.config): part.config
            for part in model.modules()
            if hasattr(part, "config") and hasattr(part.config, "_attn_implementation")
        }
        self._configs: list[Any] = list(configs.values())
        self._adapted: list[tuple[Any, Callable[..., Any]]] = [
            (part, ADAPTERS[name](part))
            for part in model.modules()
            if (name := f"{type(part).__module__}.{type(part).__qualname__}") in ADAPTERS
        ]
        kinds = {param.device.type for param in model.parameters()}
        self._device_types = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]  # not meta

    def replace_in_calls(self, part: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the forward of a part in paged calls; the part must not have an instance forward."""
        self._adapted.append((part, forward))

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Disable autocast and compiled code within the block."""
        with ExitStack() as contexts:
            for kind in self._device_types:
                contexts.enter_context(torch.autocast(kind, enabled=False))
            if any(map(_is_compiled, self.model.modules())):  # paged attention cannot be traced
                contexts.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    @contextmanager
    def paged(self, call: PagedCall | ShapeProbe) -> Iterator[None]:
        """Make the forwards of the model within the block paged, for this thread; threads take turns.

        Args:
            call: The call that serves the attention layers.
        """
        with _one_at_a_time, self.undisturbed(), self._redirect(call):
            yield

    @contextmanager
    def _redirect(self, call: PagedCall | ShapeProbe) -> Iterator[None]:
        before = [(config, config._attn_implementation) for config in self._configs]
        token = _call.set(call)
        try:
            for config, name in before:
                config._attn_implementation = _register_paged(name or "eager")
            for part, forward in self._adapted:
                part.forward = forward
            yield
        finally:
            for part, _ in self._adapted:
                del part.forward
            for config, name in before:
                config._attn_implementation = name
            _call.reset(token)


def _is_compiled(part: nn.Module) -> bool:
    """Return whether torch.compile was applied to a module, in place or as a wrapper."""
    return part._compiled_call_impl is not None or "_orig_mod" in part._modules


class _BloomAttention:
    """Paged forward of BLOOM's attention, which bypasses the interface, with its ALiBi.

    Args:
        module: The attention.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.slopes: Tensor | None = None

    def __call__(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return the result of the class's own forward, from cache blocks in a paged call."""
        call, module = _call.get(), self.module
        if call is None:  # another thread runs the model at the same time
            plain: tuple[Tensor, None] = type(module).forward(
                module, hidden_states, residual, alibi, attention_mask, **others
            )
            return plain
        if alibi.shape[-1] > 1 and self.slopes is None:
            # (heads, 1, positions) of this rank's heads, linear in position. The first call has two tokens.
            self.slopes = (alibi[:, 0, 1] - alibi[:, 0, 0]).clone()
        assert self.slopes is not None, "the shapes were found with two tokens"
        fused = module.query_key_value(hidden_states)[0].unflatten(-1, (module.num_heads, 3, -1))
        query, key, value = fused.unbind(-2)  # (tokens, heads, size) each
        options = AttentionOptions(scale=module.inv_norm_factor, slopes=self.slopes)
        context = call.attend(module, query, key, value, options)
        return module.dense(context.flatten(1).unsqueeze(0)) + residual, None


class _OwnAttention:
    """Paged forward of a self-attention of this package, causal and unsharded.

    Args:
        module: The attention.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.options = AttentionOptions(scale=module.head_size**-0.5)

    def __call__(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the result of the class's own forward, from cache blocks in a paged call."""
        call, module = _call.get(), self.module
        if call is None:  # another thread runs the model at the same time
            plain: Tensor = type(module).forward(module, hidden, attention_mask)
            return plain
        fused = module.qkv(hidden)[0].unflatten(-1, (-1, 3, module.head_size))
        query, key, value = fused.unbind(-2)  # (tokens, heads, size) each
        context = call.attend(module, query, key, value, self.options)
        attended: Tensor = module.projection(context.flatten(1).unsqueeze(0))
        return attended


ADAPTERS: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "transformers.models.bloom.modeling_bloom.BloomAttention": _BloomAttention,
    "colossalai.model_zoo._attention.SelfAttention": _OwnAttention,
}
"""Factories of paged forwards for attentions that bypass the interface, by full class name."""


def _register_paged(name: str) -> str:
    """Register the paged counterpart of an attention function, and return its name."""
    if name.startswith(_PREFIX):  # a sub-config that shares the attribute of its parent
        return name
    attentions, masks = _interfaces()
    known = _PREFIX + name
    if known not in attentions:
        attentions.register(known, _attention_over(name))
        masks.register(known, _mask_over(name))
    return known


def _interfaces() -> tuple[Any, Any]:
    """Return the registries of transformers for attention functions and for their masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    return AttentionInterface(), AttentionMaskInterface()


def _attention_over(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the paged attention function that replaces `name` in a config."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        call = _call.get()
        if call is None:  # another thread runs the model at the same time
            return _plain_attention(name, module)(module, query, key, value, attention_mask, **kwargs)
        options = _options_of(module, attention_mask, **kwargs)
        # (1, heads, tokens, size) each
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        return call.attend(module, query, key, value, options).unsqueeze(0), None

    return attention


def _mask_over(name: str) -> Callable[..., Tensor | None]:
    """Return the paged mask function: no mask in a paged call."""

    def mask(**kwargs: Any) -> Tensor | None:
        if _call.get() is not None:
            return None
        made: Tensor | None = _interfaces()[1][name](**kwargs)
        return made

    return mask


def _plain_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., tuple[Tensor, Tensor | None]] = _interfaces()[0].get_interface(name, eager)
    return found


def _options_of(
    module: nn.Module,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> AttentionOptions:
    """Return the attention options of a layer.

    Raises:
        ValueError: `others` has an unsupported option, or `attention_mask` is not None.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    kind = _kind_of(module)
    if kind not in PAGED_LAYER_TYPES:
        unknown.append(f"layer type {kind!r}")
    if unknown or dropout:
        reason = ", ".join(unknown) or f"dropout={dropout} (call model.eval())"
        raise ValueError(f"{type(module).__name__} cannot be served: its attention needs {reason}")
    if sliding_window is None and kind == "sliding_attention":
        config: Any = module.config
        sliding_window = config.sliding_window  # transformers applies it in the mask only
    return AttentionOptions(
        scale=scaling if scaling is not None else _default_scale(module),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )


def _kind_of(module: nn.Module) -> str:
    """Return the layer type in the config; full attention if the config has none."""
    kinds: Sequence[str] = getattr(getattr(module, "config", None), "layer_types", None) or ()
    number: int | None = getattr(module, "layer_idx", None)
    return kinds[number] if kinds and number is not None and number < len(kinds) else "full_attention"


def _default_scale(module: Any) -> float:
    scale: float = float(module.head_dim) ** -0.5
    return scale


@torch.inference_mode()
def find_shapes(model: PagedModel, run: Callable[[], Any]) -> tuple[ShapeProbe, Any]:
    """Return the probe with the attention layers' cache shapes and options, and the result of `run`.

    Args:
        model: The model.
        run: Calls it on a few tokens.
    """
    probe = ShapeProbe()
    with model.paged(probe):
        output = run()
    return probe, output
