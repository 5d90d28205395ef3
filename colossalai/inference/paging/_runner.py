"""One step of a model, or of a stage of it, on this rank: tokens and block tables in, logits out.

A step is sent between ranks as a few arrays of numbers (`StepArrays`), never as pickled objects. It is
complete: ranks keep no state of a request except the blocks.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from colossalai.inference.paging._adapter_rows import AdapterRows
from colossalai.inference.paging._attention import AttentionOptions, PagedStep
from colossalai.inference.paging._bags import BagsMemo
from colossalai.inference.paging._cache import ByteLayerCache, FloatLayerCache, LayerCache, LayerShape
from colossalai.inference.paging._calls import (
    PAGED_LAYER_TYPES,
    PagedCall,
    PagedModel,
    ShapeProbe,
    find_shapes,
)
from colossalai.inference.paging._watch import ModelWatch
from colossalai.inference.scheduling import BatchStep
from colossalai.pipeline import ModelStage

# [Note: products independent of the batch]
# A library chooses the algorithm of a product, and so its summation order, by the number of rows. For batch
# invariance a step is computed in calls with a fixed number of tokens, the last one padded, and with the
# logits of all of them. The calls run one after another: a chunk that continues in the next tile finds its
# first tokens in the cache.
_TILE_TOKENS = 16


@dataclass(frozen=True)
class StepArrays:
    """A step as arrays, with one entry per chunk unless noted otherwise.

    Attributes:
        token_ids: (tokens,) tokens of all chunks, concatenated.
        starts: Position of the first token.
        counts: Number of tokens.
        table_sizes: Number of blocks.
        tables: (sum of `table_sizes`,) blocks of all sequences.
        copies: (copies, 2) blocks to copy first: source, target.
        rows: (rows,) indices of the tokens whose logits are returned, ascending.
        adapters: Number of the adapter, 0 for none; empty if no chunk has one.
    """

    token_ids: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    table_sizes: np.ndarray
    tables: np.ndarray
    copies: np.ndarray
    rows: np.ndarray
    adapters: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(
        cls, step: BatchStep, rows: Sequence[int], number_of: Mapping[str, int] | None = None
    ) -> "StepArrays":
        """Return the arrays of a step.

        Args:
            step: The step.
            rows: Indices of the tokens whose logits are returned.
            number_of: Numbers of adapters by name, from 1 on; None without adapters.
        """
        chunks = step.chunks
        named = [chunk.sequence.request.adapter for chunk in chunks]
        adapters = [0 if name is None else (number_of or {})[name] for name in named]
        return cls(
            token_ids=_whole(token for chunk in chunks for token in chunk.token_ids),
            starts=_whole(chunk.start for chunk in chunks),
            counts=_whole(len(chunk.token_ids) for chunk in chunks),
            table_sizes=_whole(len(chunk.blocks) for chunk in chunks),
            tables=_whole(block for chunk in chunks for block in chunk.blocks),
            copies=_whole(block for pair in step.copies for block in pair).reshape(-1, 2),
            rows=_whole(rows),
            adapters=_whole(adapters if any(adapters) else ()),
        )

    def adapters_of_tokens(self) -> np.ndarray:
        """Return (tokens,) the number of each token's adapter; empty if no chunk has one."""
        return np.repeat(self.adapters, self.counts) if len(self.adapters) else self.adapters

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return dict(vars(self))


def _whole(values: Any) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialize arrays: a line of JSON with names, dtypes and shapes, then their memory."""
    head = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    return b"".join([line, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])


def unpack_arrays(message: bytes) -> dict[str, np.ndarray]:
    """Deserialize the output of `pack_arrays`."""
    line, _, memory = message.partition(b"\n")
    arrays, place = {}, 0
    for name, kind, shape in json.loads(line):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(memory, dtype=kind, count=count, offset=place).reshape(shape)
        place += arrays[name].nbytes
    return arrays


class Runner:
    """A model with a paged cache.

    Args:
        model: A causal language model of transformers, or a stage of one; in evaluation mode.
        block_size: Number of tokens of a block.
        device: Device of the model.
        is_batch_invariant: Whether the result of a token depends on its own sequence only.

    Attributes:
        pages: The model, with support for paged calls.
        shapes: Cache shapes of the attention layers.
        asked: Attention options of the layers.
    """

    def __init__(
        self, model: nn.Module, *, block_size: int, device: torch.device, is_batch_invariant: bool = False
    ) -> None:
        self.model = model
        self.pages = PagedModel(model)
        self._watch: ModelWatch | None = None
        self.block_size = block_size
        self.device = device
        self.is_batch_invariant = is_batch_invariant
        self._is_stage = isinstance(model, ModelStage)
        inner = model.model if isinstance(model, ModelStage) else model
        self._picks_rows = "logits_to_keep" in inspect.signature(inner.forward).parameters
        self._caches: dict[nn.Module, LayerCache] = {}
        self._num_blocks = 0
        # An optimization without effect on results: saves building equal index arrays again.
        self._memo = BagsMemo()
        self.shapes: Mapping[nn.Module, LayerShape] = {}
        self.asked: Mapping[nn.Module, AttentionOptions] = {}

    @property
    def bytes_per_block(self) -> int:
        """Size of a block on this rank in bytes."""
        return sum(shape.bytes_of_block(self.block_size) for shape in self.shapes.values())

    def find_shapes(self, received: Any = None) -> Any:
        """Determine the cache shapes of the layers.

        Args:
            received: Input of a later stage for two tokens.

        Returns:
            The output of the stage, valid in type and shape only.

        Raises:
            ValueError: The model `received` is passed to cannot run paged calls.
        """
        tokens = np.zeros(2, dtype=np.int64)
        try:
            probe, output = find_shapes(
                self.pages, lambda: self.forward(tokens, np.arange(2), np.arange(2), received)
            )
            self.shapes, self.asked = probe.found, probe.asked
        except ValueError:
            raise
        except Exception as error:  # foreign code may require masks and caches
            raise ValueError(
                f"{type(self.model).__name__} cannot be served: its forward fails without a mask and a cache "
                f"of its own ({type(error).__name__}: {error}): its attention does not go through the "
                "attention interface of transformers"
            ) from error
        return output

    def find_rows(self, layers: Sequence[nn.Module], received: Any = None) -> dict[nn.Module, set[str]]:
        """Determine the rows that layers are called with: all tokens, those of the logits, or others.

        Args:
            layers: The layers.
            received: For a later stage, an example of its input.

        Returns:
            For each layer that is called "tokens", "logits" or "others", or several of these.
        """
        kinds = {3: "tokens", 2: "logits"} if self._picks_rows else {3: "tokens"}
        found: dict[nn.Module, set[str]] = {}

        def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
            x: Tensor = args[0]
            found.setdefault(layer, set()).add(kinds.get(x.shape[:-1].numel(), "others"))

        handles = [layer.register_forward_pre_hook(note) for layer in layers]
        try:
            with torch.inference_mode(), self.pages.paged(ShapeProbe()):
                tokens, positions = np.zeros(3, np.int64), np.arange(3)
                self.forward(tokens, positions, np.arange(2), random_like(received, 3))
        finally:
            for handle in handles:
                handle.remove()
        return found

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches of all layers, for the current parts of the model."""
        self._num_blocks = num_blocks
        size = self.block_size
        num_made = num_blocks + self.is_batch_invariant  # one more block for the padding of tiles
        self._caches = {
            layer: ByteLayerCache(shape, num_blocks=num_made, block_size=size)
            if shape.is_in_bytes
            else FloatLayerCache(shape, num_blocks=num_made, block_size=size, device=self.device)
            for layer, shape in self.shapes.items()
        }

    def weights_stamp(self) -> int:
        """Return a number that changes with the values of the model; see `ModelWatch.stamp`."""
        if self._watch is None:  # created late, after parts are replaced by faster ones
            self._watch = ModelWatch(self.model)
        return self._watch.stamp()

    def keep_bytes(self) -> None:
        """Quantize keys and values to 8 bits in caches allocated from now on.

        Raises:
            ValueError: The device is not a CPU.
        """
        if self.device.type != "cpu":
            raise ValueError(f"kv_dtype='int8' is for CPUs, and the model is on {self.device}: leave it out")
        self.shapes = {layer: replace(shape, is_in_bytes=True) for layer, shape in self.shapes.items()}

    @torch.inference_mode()
    def run(self, arrays: StepArrays, received: Any = None) -> Any:
        """Run a step.

        Args:
            arrays: The step.
            received: On a later stage, the output of the previous one.

        Returns:
            The logits (rows, vocabulary) on the last stage, else the input of the next stage.

        Raises:
            ValueError: The model was cast or moved, or draws dropout masks.
        """
        if self._watch is not None:
            self._watch.refuse_unservable()
        if len(arrays.copies):
            sources, targets = torch.from_numpy(arrays.copies.copy()).to(self.device).unbind(1)
            for cache in self._caches.values():
                cache.copy(sources, targets)
        tables = np.split(arrays.tables, np.cumsum(arrays.table_sizes)[:-1])
        if self.is_batch_invariant:
            return self._run_in_tiles(arrays, tables, received)
        step = PagedStep(arrays.starts, arrays.counts, tables, self.block_size, self.device, memo=self._memo)
        with self.pages.paged(self._call(step, arrays.adapters_of_tokens(), arrays.rows)):
            return self.forward(arrays.token_ids, step.positions, arrays.rows, received)

    def _call(self, step: PagedStep, adapters: np.ndarray, rows: np.ndarray) -> PagedCall:
        """Return the paged call of a step.

        Args:
            step: The step.
            adapters: (tokens,) numbers of adapters, or empty.
            rows: Indices of the tokens whose logits are returned.
        """
        if not len(adapters):
            return PagedCall(step, self._caches)
        logits = AdapterRows.of(adapters[rows], self.device)
        return PagedCall(step, self._caches, AdapterRows.of(adapters, self.device), logits)

    def _run_in_tiles(self, arrays: StepArrays, tables: Sequence[np.ndarray], received: Any) -> Any:
        """Run a step in calls of a fixed size. See [Note: products independent of the batch]."""
        ends = np.cumsum(arrays.counts)
        firsts = ends - arrays.counts
        total = len(arrays.token_ids)
        adapters = arrays.adapters_of_tokens()
        found = []
        for begin in range(0, total, _TILE_TOKENS):
            end = min(begin + _TILE_TOKENS, total)
            num_missing = begin + _TILE_TOKENS - end
            here = np.flatnonzero((firsts < end) & (ends > begin))
            low, high = np.maximum(firsts[here], begin), np.minimum(ends[here], end)
            step = PagedStep(
                np.append(arrays.starts[here] + low - firsts[here], np.zeros(num_missing, np.int64)),
                np.append(high - low, np.ones(num_missing, np.int64)),
                [*(tables[chunk] for chunk in here.tolist()), *[np.array([self._num_blocks])] * num_missing],
                self.block_size,
                self.device,
                bags_only=True,
            )
            tokens = np.append(arrays.token_ids[begin:end], np.zeros(num_missing, np.int64))
            given = tree_map_only(Tensor, partial(_tile_of, begin=begin, end=end), received)
            chosen = np.zeros(_TILE_TOKENS, np.int64)
            chosen[: len(adapters[begin:end])] = adapters[begin:end]
            every = np.arange(_TILE_TOKENS)
            with self.pages.paged(self._call(step, chosen, every)):
                output = self.forward(tokens, step.positions, every, given)
            if self._is_logits(output):
                rows = arrays.rows[(arrays.rows >= begin) & (arrays.rows < end)] - begin
                found.append(output.index_select(0, self._tensor(rows)))
            else:
                found.append(tree_map_only(Tensor, lambda part: part[:, : end - begin], output))  # noqa: B023
        dim = 0 if self._is_logits(found[0]) else 1
        return tree_map(lambda *parts: _concatenate(parts, dim), *found)

    @staticmethod
    def _is_logits(output: Any) -> bool:
        return isinstance(output, Tensor) and output.dim() == 2  # activations of stages are (1, tokens, ...)

    @contextmanager
    def paged_call(self, starts: np.ndarray, counts: np.ndarray) -> Iterator[None]:
        """Permit calls of parts of the model, for tokens of one sequence in the first blocks.

        Args:
            starts: (1,) position of the first token.
            counts: (1,) number of tokens.
        """
        tables = [np.arange(-(-int(starts[0] + counts[0]) // self.block_size))]
        step = PagedStep(starts, counts, tables, self.block_size, self.device)
        with self.pages.paged(PagedCall(step, self._caches)):
            yield

    def forward(self, token_ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, received: Any) -> Any:
        """Call the model, paged or not, on concatenated tokens.

        Args:
            token_ids: The tokens.
            positions: Their positions.
            rows: Indices of the tokens whose logits are returned.
            received: On a later stage, the output of the previous one.
        """
        keep = self._tensor(rows)
        inputs = {
            "input_ids": self._tensor(token_ids).unsqueeze(0),
            "position_ids": self._tensor(positions).unsqueeze(0),
            "use_cache": False,
        }
        if self._picks_rows:
            inputs["logits_to_keep"] = keep
        output = self.model(received, inputs) if self._is_stage else self.model(**inputs)
        logits = getattr(output, "logits", None)
        if logits is None:
            return output
        return logits[0] if self._picks_rows else logits[0].index_select(0, keep)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device)


def _tile_of(tensor: Tensor, *, begin: int, end: int) -> Tensor:
    """Return the tokens of one tile of a stage's input, padded with zeros."""
    tile = tensor.new_zeros(1, _TILE_TOKENS, *tensor.shape[2:])
    tile[:, : end - begin] = tensor[:, begin:end]
    return tile


def _concatenate(parts: Sequence[Any], dim: int) -> Any:
    return torch.cat(list(parts), dim) if isinstance(parts[0], Tensor) else parts[0]


# Chunks of one sequence: number of tokens, and number of tokens before them.
_CHECKED_CHUNKS = ((7, 0), (1, 7), (1, 8), (12, 9), (1, 21), (3, 22))
# Even in float64, attention of transformers with a softcap computes its softmax in float32.
_CHECKED_ERROR = {torch.float64: 1e-6, torch.float32: 1e-4}
_CHECKED_ERROR_OF_HALVES = 0.05


@torch.inference_mode()
def check_model(runner: Runner, vocab_size: int, max_length: int, received: Any = None) -> None:
    """Check that paged calls of a model compute the same as its plain forward.

    See [Note: check of a served model]. Allocates caches for the check, and frees
    them. Ranks that share layers call it together.

    Args:
        runner: The model, or a stage of it, without caches.
        vocab_size: Number of tokens of the vocabulary.
        max_length: Maximum number of tokens of a sequence.
        received: For a later stage, an example of its input, for any number of tokens.

    Raises:
        ValueError: `runner` has a model with state outside its attention, or with attention that bypasses
            the interface of transformers.
    """
    model = runner.model
    missed = check_layer_types(runner)
    chunks = [min(count, max_length - before) for count, before in _CHECKED_CHUNKS if before < max_length]
    total = sum(chunks)
    tokens = np.random.default_rng(0).integers(0, vocab_size, total)
    whole = random_like(received, total)
    try:
        with runner.pages.undisturbed():
            plain = _tokens_first(runner.forward(tokens, np.arange(total), np.arange(total), whole))
    except Exception as failure:  # foreign code, with sizes that may not fit
        raise ValueError(
            f"{type(model).__name__} cannot be served: its own forward fails "
            f"({type(failure).__name__}: {failure})"
        ) from failure
    found, start = [], 0
    runner.allocate(-(-total // runner.block_size))
    for count in chunks:
        table = np.arange(-(-(start + count) // runner.block_size))
        one = np.ones(1, np.int64)
        arrays = StepArrays(
            token_ids=tokens[start : start + count],
            starts=one * start,
            counts=one * count,
            table_sizes=one * len(table),
            tables=table,
            copies=np.empty((0, 2), np.int64),
            rows=np.arange(count),
        )
        part = tree_map_only(Tensor, lambda tensor: tensor[:, start : start + count], whole)  # noqa: B023
        found.append(_tokens_first(runner.run(arrays, part)))
        start += count
    runner.allocate(0)  # frees the caches of the check
    bound = _CHECKED_ERROR.get(plain.dtype, _CHECKED_ERROR_OF_HALVES)
    error = (torch.cat(found).double() - plain.double()).abs().max() / plain.double().abs().max()
    if not error <= bound:
        where = f": {', '.join(missed[:3])} keep a state of their own" if missed else ""
        raise ValueError(
            f"{type(model).__name__} cannot be served: cut into chunks, its outputs differ by {error:.1e} of "
            f"the largest{where}. Served are models whose attention layers all go through the attention "
            "interface of transformers (Llama, Mistral, Qwen, Gemma, Phi, GPT-2, GPT-NeoX, OPT, ...)"
        )


def check_layer_types(runner: Runner) -> list[str]:
    """Reject a model whose config names layers with other state than keys and values.

    Args:
        runner: The model, with known shapes.

    Returns:
        Names of the layers without attention.

    Raises:
        ValueError: `runner` has such a model.
    """
    model = runner.model
    missed = [
        f"{name} ({type(part).__name__})"
        for name, part in model.named_modules()
        if hasattr(part, "layer_idx") and not any(inner in runner.shapes for inner in part.modules())
    ]
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - PAGED_LAYER_TYPES
    if kinds:
        raise ValueError(
            f"{type(model).__name__} cannot be served: it has layers of the types {sorted(kinds)}, which "
            f"keep something else than keys and values of all tokens: {', '.join(missed[:3])}"
        )
    return missed


def random_like(received: Any, num_tokens: int) -> Any:
    """Return a random input of a stage, (1, tokens, ...) each, for `num_tokens` tokens."""

    def drawn(tensor: Tensor) -> Tensor:
        generator = torch.Generator(tensor.device).manual_seed(0)
        shape = (1, num_tokens, *tensor.shape[2:])
        return torch.randn(shape, generator=generator, dtype=tensor.dtype, device=tensor.device)

    return tree_map_only(Tensor, drawn, received)


def _tokens_first(output: Any) -> Tensor:
    """Return logits (tokens, vocabulary), or the first activation of a stage as (tokens, hidden)."""
    first: Tensor = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return first if first.dim() == 2 else first[0]
