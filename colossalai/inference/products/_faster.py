"""Faster parts for inference-only models: packed products, and whole blocks with few operations.

Parts are recognized by their structure, not by class names, and every replacement is checked: it is compared
with the original part on random input in a paged call, and a part that differs stays as it was. The model
loses the parameters that a replacement has packed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.communication import all_reduce_in_place, gather_forward_split_backward
from colossalai.inference.paging import AttentionOptions, Runner, ShapeProbe, current_call, random_like
from colossalai.inference.products._delta import NO_DELTAS, AdaptedPair, Deltas, LinearDelta
from colossalai.inference.products._products import Activation, GatedPair, Product
from colossalai.inference.products._quantized_linear import QuantizedLinear, merge_parts, product_parts
from colossalai.inference.products._quantized_weight import QuantizedWeight
from colossalai.logging import get_dist_logger

_CHECKED_TOKENS = 6
_CHECKED_ERROR = {torch.float64: 1e-10, torch.float32: 1e-4}
_CHECKED_ERROR_OF_HALVES = 0.03
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
}
_ANGLES_BY_POSITION = frozenset({"default", "linear", "llama3", "yarn"})


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, or this rank's part of one.

    Args:
        linear: The original layer.
        delta: Delta of adapters; None for none.

    Raises:
        ValueError: `linear` is not a linear layer.
    """

    def __init__(self, linear: nn.Module, delta: LinearDelta | None = None) -> None:
        super().__init__()
        self.delta = delta
        self.product = self._pack(linear)

    def load(self, linear: nn.Module) -> None:
        """Pack the values of a linear layer of the same shape.

        Raises:
            ValueError: `linear` is not a linear layer.
        """
        self.product = self._pack(linear).in_place_of(self.product)

    def _pack(self, linear: nn.Module) -> Product:
        """Record the bias and the collectives of a linear layer, and return its product."""
        parts = product_parts(linear)
        if parts is None:
            raise ValueError(f"{type(linear).__name__} is not a linear layer")
        self.summed_over, self.gathered_over = parts.summed_over, parts.gathered_over
        self.num_outputs = parts.num_outputs
        is_summed = parts.summed_over is not None
        self.bias_after_sum = parts.bias.detach() if is_summed and parts.bias is not None else None
        return parts.product(has_bias=not is_summed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with all features; (..., in) to (..., out)."""
        rows = x.reshape(-1, x.shape[-1])
        made = self.product(rows)
        if self.delta is not None:
            self.delta.add(made, rows)
        made = self.complete(made).unflatten(0, x.shape[:-1])  # x may be empty
        if self.gathered_over is not None:  # all-gather over the tensor ranks; drops padded outputs
            made = gather_forward_split_backward(made, self.gathered_over, -1)[..., : self.num_outputs]
        return made

    def complete(self, made: Tensor) -> Tensor:
        """Sum this rank's partial product with those of the other ranks (all-reduce), and add the bias."""
        if self.summed_over is not None:
            made = all_reduce_in_place(made.contiguous(), self.summed_over)
        return made if self.bias_after_sum is None else made.add_(self.bias_after_sum)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + product; both (tokens, features)."""
        # Only one rank adds the residual before the all-reduce, so the sum contains it once.
        has_residual = self.summed_over is None or self.summed_over.rank == 0
        made = self.product(x, add=residual) if has_residual else self.product(x)
        if self.delta is not None:
            self.delta.add(made, x)
        return self.complete(made) if self.summed_over is not None else made


class FastNorm(nn.Module):
    """Root mean square norm (1910.07467), in five operations, three of which read the input.

    On a CPU torch's own `rms_norm` consists of a dozen, each of which writes a tensor of the input's size.

    Args:
        weight: (features,).
        epsilon: Added to the mean of the squares.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        precise = torch.promote_types(weight.dtype, torch.float32)
        self.epsilon = nn.Buffer(torch.tensor(epsilon, dtype=precise, device=weight.device), persistent=False)

    def load(self, norm: Any) -> None:
        """Copy the values of a norm of the same shape."""
        self.weight.copy_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of the last dimension, computed in float32 or better."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.epsilon.dtype)
        inverse = torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        return x.mul(inverse).mul_(self.weight).to(x.dtype)


class FastBlock(nn.Module):
    """A block of norm, attention with rotary positions, norm and gated feed-forward, as in Llama.

    Args:
        block: A block of transformers with these parts.
        asked: Attention options of each attention of the model.
        deltas: Deltas of adapters by linear layer.

    Raises:
        ValueError: `block` has other parts.
    """

    def __init__(
        self, block: Any, asked: Mapping[nn.Module, AttentionOptions], deltas: Deltas = NO_DELTAS
    ) -> None:
        super().__init__()
        _expect(block, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
        attention, mlp = block.self_attn, block.mlp
        _expect(attention, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
        _expect(mlp, {"gate_proj", "up_proj", "down_proj"}, {"act_fn"})
        self.attention_norm = _norm(block.input_layernorm)
        self.feed_forward_norm = _norm(block.post_attention_layernorm)
        self.head_size = int(attention.head_dim)
        self.qkv, self.num_query_heads, self.num_heads = _merge_qkv(attention, self.head_size)
        self.query_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.qkv_deltas = [deltas.get(layer) for layer in _projections(attention)]
        self.output = PackedLinear(attention.o_proj, deltas.get(attention.o_proj))
        self.gated: GatedPair | AdaptedPair = _make_gated_pair(mlp)
        if mlp.gate_proj in deltas or mlp.up_proj in deltas:
            self.gated = AdaptedPair(self.gated, deltas.get(mlp.gate_proj), deltas.get(mlp.up_proj))
        self.down = PackedLinear(mlp.down_proj, deltas.get(mlp.down_proj))
        # Not a submodule: it has no parameters any more, and serves as the key of its cache.
        object.__setattr__(self, "_attention", attention)
        if attention not in asked:
            raise ValueError(f"{type(attention).__name__} does not go through the attention interface")
        self.options = asked[attention]

    def load(self, block: Any) -> None:
        """Load the values of a block of the same shapes; deltas stay."""
        attention, mlp = block.self_attn, block.mlp
        self.attention_norm.load(block.input_layernorm)
        self.feed_forward_norm.load(block.post_attention_layernorm)
        self.qkv = _merge_qkv(attention, self.head_size)[0].in_place_of(self.qkv)
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.load(attention.q_norm)
            self.key_norm.load(attention.k_norm)
        self.output.load(attention.o_proj)
        if isinstance(self.gated, AdaptedPair):
            self.gated.pair = _make_gated_pair(mlp).in_place_of(self.gated.pair)
        else:
            self.gated = _make_gated_pair(mlp).in_place_of(self.gated)
        self.down.load(mlp.down_proj)

    @property
    def products(self) -> tuple[Product, ...]:
        """Products of the block that are not in a `PackedLinear`."""
        pair = self.gated.pair if isinstance(self.gated, AdaptedPair) else self.gated
        return (self.qkv, *pair.products)

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        """Return the output of the block; (1, tokens, hidden)."""
        return self.run(hidden_states[0], turns_of(*position_embeddings)).unsqueeze(0)

    def run(self, x: Tensor, turns: "Turns") -> Tensor:
        """Return the output of the block; x is (tokens, hidden)."""
        call = current_call()
        assert call is not None, "a model with faster parts runs in paged calls only"
        normed = self.attention_norm(x)
        fused = self.qkv(normed)
        if any(delta is not None and delta.is_due for delta in self.qkv_deltas):
            self._adapt(fused, normed)
        num_tokens = x.shape[0]
        fused = fused.view(num_tokens, -1, self.head_size)
        turned, value = fused.split_with_sizes((self.num_query_heads + self.num_heads, self.num_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turned.split((self.num_query_heads, self.num_heads), 1)
            turned = torch.cat((self.query_norm(query), self.key_norm(key)), 1)
        turned = _rotate(turned, turns)
        query, key = turned.split_with_sizes((self.num_query_heads, self.num_heads), 1)
        context = call.attend(self.__dict__["_attention"], query, key, value, self.options)
        x = self.output.add_to(x, context.reshape(num_tokens, -1))
        inner = self.gated(self.feed_forward_norm(x))
        return self.down.add_to(x, inner)

    def _adapt(self, fused: Tensor, normed: Tensor) -> None:
        """Add the deltas of adapters to queries, keys and values, in place."""
        heads = (self.num_query_heads, self.num_heads, self.num_heads)
        parts = fused.split([count * self.head_size for count in heads], -1)
        for delta, part in zip(self.qkv_deltas, parts, strict=True):
            if delta is not None:
                delta.add(part, normed)


Turns = tuple[Tensor, Tensor]
"""Cosines of the angles of each token, and sines, the first half negative; (tokens, 1, size)."""


def turns_of(cos: Tensor, sin: Tensor) -> Turns:
    """Return the arguments of `_rotate`.

    Args:
        cos: (1, tokens, size), both halves the same.
        sin: The same.
    """
    first, second = sin[0].chunk(2, -1)
    return cos[0].unsqueeze(1), torch.cat((first.neg(), second), -1).unsqueeze(1)


def _rotate(x: Tensor, turns: Turns) -> Tensor:
    """Rotate pairs of features by the angle of a token's position (2104.09864).

    Args:
        x: (tokens, heads, size); feature i is paired with feature i + size / 2.
        turns: The angles.
    """
    cos, sin = turns
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class FastLogits(NamedTuple):
    """Output of a model; (1, rows, vocabulary)."""

    logits: Tensor


class FastModel(nn.Module):
    """A causal language model of `FastBlock`s only, without the overhead of its own forward.

    Each step would repeat it: unused masks, checks, wrapped outputs.

    Args:
        model: The model.

    Raises:
        ValueError: `model` has other parts, or angles that depend on more than a token's position.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        _expect(model, {"model", "lm_head"})
        inner = model.model
        _expect(inner, {"embed_tokens", "layers", "norm", "rotary_emb"})
        blocks = [getattr(layer, "faster", None) for layer in inner.layers]
        if not all(isinstance(block, FastBlock) for block in blocks):
            raise ValueError(f"{type(model).__name__} has blocks that are served as they are")
        rotary = inner.rotary_emb
        if rotary.rope_type not in _ANGLES_BY_POSITION:
            raise ValueError(f"the angles of {type(rotary).__name__} depend on the length of a sequence")
        self.embedding, self.norm, self.head = inner.embed_tokens, inner.norm, model.lm_head
        self.blocks = nn.ModuleList(block for block in blocks if block is not None)
        self.frequencies = nn.Buffer(rotary.inv_freq.float())
        self.scaling = float(rotary.attention_scaling)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **others: Any
    ) -> FastLogits:
        """Return logits; see the model's own forward."""
        x = self.embedding(input_ids)[0]
        angles = position_ids[0].unsqueeze(1).float() * self.frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        turns = (
            torch.cat((cos, cos), 1)[:, None].to(x.dtype),
            torch.cat((-sin, sin), 1)[:, None].to(x.dtype),
        )
        for block in self.blocks:
            x = block.run(x, turns)  # type: ignore[operator]
        return FastLogits(self.head(self.norm(x.index_select(0, logits_to_keep)).unsqueeze(0)))


FasterPart = PackedLinear | FastNorm | FastBlock
"""Replacement of a part of a model; `load` takes new values of the original part."""


@torch.inference_mode()
def make_faster(
    runner: Runner, vocab_size: int, received: Any = None, deltas: Deltas = NO_DELTAS
) -> dict[str, FasterPart | FastModel]:
    """Replace parts of a model by equivalent, faster ones.

    Ranks that share layers call it together.

    Args:
        runner: The model, or a stage of it, with known shapes and without caches; used for inference only
            from now on.
        vocab_size: Number of tokens of the vocabulary.
        received: For a later stage, an example of its input.
        deltas: Deltas of adapters by linear layer; the replacement of a layer applies its delta.

    Returns:
        The replacements by name; "" for the whole model.
    """
    calls = _record_calls(runner, vocab_size, received)
    replaced: dict[str, FasterPart | FastModel] = {}
    within: set[nn.Module] = set()  # parts of replaced modules
    unequal: list[str] = []

    def improve(name: str, part: nn.Module, fast: FasterPart | FastModel | None) -> None:
        if fast is None:
            return
        if _agrees(runner, part, fast, calls[part]):
            replaced[name] = fast
            _replace_forward(part, fast)
        else:
            unequal.append(f"{name or 'the whole'} ({type(part).__name__})")

    for name, part in list(runner.model.named_modules()):
        if part in calls and part not in within:
            held = set(part.modules())
            improve(name, part, _faster_part(part, runner.asked, deltas))
            if name in replaced:
                within |= held
    improve("", runner.model, _faster_model(runner.model))
    _check_whole(runner, vocab_size, received)
    if unequal:
        get_dist_logger().log_once(
            f"{len(unequal)} parts of {type(runner.model).__name__} are served as they are: faster ones gave "
            f"other results, as for {', '.join(unequal[:3])}",
            ranks=[0],
        )
    return replaced


def _faster_part(
    part: nn.Module, asked: Mapping[nn.Module, AttentionOptions], deltas: Deltas
) -> FasterPart | None:
    """Return a faster candidate for a part; None for an unknown structure."""
    block, linear = (
        partial(FastBlock, asked=asked, deltas=deltas),
        partial(PackedLinear, delta=deltas.get(part)),
    )
    for kind in (block, linear, _norm):
        try:
            return kind(part)
        except (AttributeError, ValueError):
            continue  # another structure: its parts are tried later
    return None


def _faster_model(model: nn.Module) -> FastModel | None:
    """Return a faster candidate for a whole model with replaced parts; None for an unknown structure."""
    try:
        return FastModel(model)
    except (AttributeError, ValueError):
        return None


def served_products(model: nn.Module) -> list[Product]:
    """Return the products of the faster parts of a model."""
    found: list[Product] = []
    for part in model.modules():
        if isinstance(part, FastBlock):
            found += part.products
        elif isinstance(part, PackedLinear):
            found.append(part.product)
    return found


def _check_whole(runner: Runner, vocab_size: int, received: Any) -> None:
    """Check that a model's own code uses no value that was moved into a faster part.

    Raises:
        ValueError: `runner` has a model that uses one.
    """
    try:
        _record_calls(runner, vocab_size, received)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(runner.model).__name__} cannot be served from files: it uses weights of its layers in "
            f"other places than the layers ({type(error).__name__}: {error}); serve it as a model in memory"
        ) from error


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _record_calls(runner: Runner, vocab_size: int, received: Any) -> dict[nn.Module, _Call]:
    """Return the arguments of each part's first call, with random numbers for its first tensor."""
    calls: dict[nn.Module, _Call] = {}
    generator = torch.Generator(runner.device).manual_seed(0)

    def randomized(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
        return value

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {name: randomized(kwargs[name]) for name in ("hidden_states",) if name in kwargs}
        calls.setdefault(module, (tuple(map(randomized, args[:1])) + args[1:], kwargs | named))

    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in runner.model.modules()]
    tokens = np.random.default_rng(0).integers(0, vocab_size, _CHECKED_TOKENS)
    positions = np.arange(_CHECKED_TOKENS)
    try:
        with runner.pages.paged(ShapeProbe()):
            runner.forward(tokens, positions, positions, random_like(received, _CHECKED_TOKENS))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _agrees(runner: Runner, part: nn.Module, fast: nn.Module, call: _Call) -> bool:
    """Return whether two parts agree in a paged call; False if one of them cannot be called."""
    args, kwargs = call
    runner.allocate(-(-_CHECKED_TOKENS // runner.block_size))
    found = []
    try:
        for each in (part, fast):
            with runner.paged_call(np.zeros(1, np.int64), np.array([_CHECKED_TOKENS])):
                # Call `forward` directly: hooks of a pipeline stage would end the call here.
                output = each.forward(*args, **kwargs)
            found.append(next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).double())
    except (IndexError, RuntimeError, TypeError, ValueError):  # angles of some features only, other arguments
        return False
    finally:
        runner.allocate(0)
    expected, made = found
    bound = _CHECKED_ERROR.get(next(iter(runner.shapes.values())).dtype, _CHECKED_ERROR_OF_HALVES)
    ways = {layer.way for layer in part.modules() if isinstance(layer, QuantizedLinear)}
    if any(way.rounds_rows or way.bits == 4 for way in ways):
        # Both use the same codes. They differ for values of a row between two codes, or, in 4 bits, by the
        # rounding of bfloat16.
        bound = max(bound, _CHECKED_ERROR_OF_HALVES)
    return expected.shape == made.shape and bool(
        (made - expected).abs().max() <= bound * expected.abs().max()
    )


def _replace_forward(part: nn.Module, fast: nn.Module) -> None:
    """Replace the forward of a part by a faster one, and free the part's own tensors.

    The module itself stays, for stacks of blocks, hooks and the model's own code. An attention that remains
    as the key of its cache is emptied, too, so that its weights are not in memory twice. Models read the
    dtype and the device of a layer's weight, so an empty tensor replaces it.
    """
    kept = set(fast.modules())
    for emptied in [each for each in part.modules() if each not in kept]:
        weight = emptied._parameters.get("weight")
        if weight is not None:
            emptied.__dict__["weight"] = weight.detach().new_empty(0)
        for held in (emptied._parameters, emptied._buffers, emptied._modules):
            held.clear()
    part.add_module("faster", fast)
    part.forward = fast.forward


def _merge_qkv(attention: Any, head_size: int) -> tuple[Product, int, int]:
    """Return one product for query, key and value, and the numbers of query and key heads on this rank."""
    parts = [product_parts(layer) for layer in _projections(attention)]
    merged = merge_parts(parts)
    query, key = (part.out_features // head_size for part in parts[:2] if part is not None)
    return merged.product(), query, key


def _projections(attention: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _make_gated_pair(mlp: Any) -> GatedPair:
    """Return the products of a gated feed-forward before the last one."""
    parts = [product_parts(layer) for layer in (mlp.gate_proj, mlp.up_proj)]
    activation = _activation(mlp.act_fn)
    if any(part is not None and isinstance(part.weight, QuantizedWeight) for part in parts):
        # Rows are quantized once, and the operator has a cost per call: one product is faster than two.
        return GatedPair((merge_parts(parts).product(),), activation)
    return GatedPair((PackedLinear(mlp.gate_proj).product, PackedLinear(mlp.up_proj).product), activation)


def _expect(module: nn.Module, needed: set[str], possible: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    children = {name for name, _ in module.named_children()}
    params = {name for name, _ in module.named_parameters(recurse=False)}
    if not needed <= children <= needed | possible or params:
        raise ValueError(f"{type(module).__name__} has the parts {sorted(children | params)}")


def _norm(norm: Any) -> FastNorm:
    """Return the fast form of a root mean square norm.

    Raises:
        AttributeError: `norm` is another kind of module.
    """
    if not type(norm).__name__.endswith("RMSNorm"):
        raise AttributeError(f"{type(norm).__name__} is not a root mean square norm")
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    if list(dict(norm.named_parameters())) != ["weight"]:
        raise AttributeError(f"{type(norm).__name__} has more than a weight")
    return FastNorm(norm.weight, float(epsilon))


def _activation(function: nn.Module) -> Activation:
    name = type(function).__name__
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name} is not known")
    return _ACTIVATIONS[name]
