"""Construction of an engine: the model loaded, sharded over ranks and checked, and its cache allocated."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.inference._engine import InferenceEngine
from colossalai.inference._executor import LocalExecutor
from colossalai.inference._load import (
    EngineOptions,
    ModelSource,
    check_tensor_ranks,
    checkpoint_of,
    load_model,
    load_tokenizer,
)
from colossalai.inference._ranks import RanksExecutor, StepLink, receive_sample, send_sample, work
from colossalai.inference.adapters import check_adapters, load_adapters
from colossalai.inference.loading import (
    ServedWeights,
)
from colossalai.inference.models import ModelClass, resolve_model
from colossalai.inference.paging import Runner, check_model
from colossalai.inference.products import (
    AdaptedForward,
    QuantizedLinear,
    keep_row_tables,
    make_faster,
    product_parts,
    served_products,
    without_rounded_rows,
)
from colossalai.inference.scheduling import BlockPool, EngineLimits, Scheduler
from colossalai.inference.speculation import DraftModel, NgramDrafts, SpeculationWay, Speculator
from colossalai.pipeline import cut_model
from colossalai.tensor import evaluation_mode


def build_engine(
    model: nn.Module, tokenizer: Any, options: EngineOptions, *, link: StepLink | None = None
) -> InferenceEngine:
    """Return an engine for a model, on rank 0 of its ranks; the others call `serve_rank` with theirs.

    Args:
        model: A causal language model of transformers, or this rank's part of one.
        tokenizer: Its tokenizer; None if only tokens are exchanged.
        options: Options of the engine.
        link: Link to the other ranks; None for a single rank.

    Raises:
        ValueError: `model` cannot be served, or `options` leave no room for one request.
    """
    limits = EngineLimits(
        max_length=longest_of(model.config, options.max_length),
        vocab_size=_vocab_size(model),
        eos_token_ids=_eos_tokens(model, tokenizer),
        max_queue=options.max_queue,
        adapters=tuple(options.adapters),
    )
    _check_vocabulary(options, limits.vocab_size, tokenizer)
    draft = _draft_runner(options)
    runner, weights, num_blocks = _make_runner(
        model, options, link, bytes_beside=0 if draft is None else draft.bytes_per_block
    )
    executor = LocalExecutor(runner, weights) if link is None else RanksExecutor(runner, link, weights)
    scheduler = Scheduler(
        BlockPool(num_blocks, options.block_size, keeps_prefixes=options.has_prefix_cache),
        max_running=options.max_running,
        max_tokens=options.max_tokens_per_step,
        num_microbatches=executor.depth,
    )
    speculator = _speculator(options, draft, num_blocks)
    return InferenceEngine(executor, scheduler, limits, tokenizer=tokenizer, speculator=speculator)


def engine_of_ranks(
    model: ModelSource, options: EngineOptions, *, mesh: Mesh | None, tokenizer: Any = None
) -> InferenceEngine | None:
    """Return an engine on rank 0, for a model whose parts are loaded by all ranks.

    The other ranks run its steps until the engine is closed, and return None.

    Args:
        model: The model to serve.
        options: Options of the engine.
        mesh: The ranks, as (pp, tp); None for this process alone.
        tokenizer: The tokenizer, on rank 0.
    """
    part = load_model(model, options, mesh)
    if not isinstance(model, nn.Module):
        options = replace(options, is_owned=True)
    link = None if mesh is None else StepLink(mesh, next(part.parameters()).device)
    if link is None or (link.is_first and link.tensor.rank == 0):
        return build_engine(part, tokenizer, options, link=link)
    serve_rank(part, options, link=link)
    return None


def serve_rank(model: nn.Module, options: EngineOptions, *, link: StepLink) -> None:
    """Run the steps of an engine on a rank other than rank 0, until it is closed; see `build_engine`."""
    build_worker(model, options, link=link)()


def build_worker(model: nn.Module, options: EngineOptions, *, link: StepLink) -> Callable[[], None]:
    """Return a function that runs the steps of an engine on a rank other than rank 0; see `build_engine`.

    A call returns when rank 0 pauses or closes the engine.
    """
    _check_vocabulary(options, _vocab_size(model), None)
    _draft_model(options)  # loading is collective; the draft model runs on rank 0 only
    runner, weights, _ = _make_runner(model, options, link)
    return partial(work, runner, link, weights)


def check_ranks(
    model: ModelClass,
    options: EngineOptions,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    tp: int,
    pp: int,
) -> None:
    """Check a model and its options before ranks are started, as far as possible; allocates no memory.

    Args:
        model: The model to serve.
        options: Options of the engine.
        tokenizer: Folder of the tokenizer. Default: the model's own.
        tp: Number of tensor parallel ranks.
        pp: Number of pipeline stages.

    Raises:
        ValueError: `model` cannot be served or has no values, `tokenizer` is invalid, `options` exceed the
            window of the model, have adapters that do not fit or a draft model with another vocabulary, or
            `tp` or `pp` ranks cannot share the model.
    """
    resolved = resolve_model(model)
    checkpoint_of(resolved, options)
    loaded = load_tokenizer(model, tokenizer)
    _check_vocabulary(options, resolved.config.vocab_size, loaded)
    longest_of(resolved.config, options.max_length)
    whole = resolved.build()
    check_adapters(whole, options.adapters)
    if tp > 1:
        check_tensor_ranks(whole, tp)
    if pp > 1:
        cut_model(whole, pp, [0], balance="parameters")


def _check_vocabulary(options: EngineOptions, vocab_size: int, tokenizer: Any) -> None:
    """Reject a draft model with another vocabulary than the served model."""
    way = _way_with_model(options)
    if way is None:
        return
    resolved = resolve_model(way.maker)
    if resolved.config.vocab_size != vocab_size:
        raise ValueError(
            f"speculate={options.speculate!r}: {resolved.name} has {resolved.config.vocab_size} tokens, and "
            f"the model that is served {vocab_size}; drafts come from a model with the same tokens"
        )
    own = None if tokenizer is None else load_tokenizer(way.maker, None)
    if own is not None and own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"speculate={options.speculate!r}: the tokenizer of {resolved.name} has other tokens than the "
            "model that is served; drafts come from a model with the same ones"
        )


def _way_with_model(options: EngineOptions) -> SpeculationWay | None:
    way = None if options.speculate is None else SpeculationWay.of(options.speculate)
    return None if way is None or way.maker == "ngram" else way


def _draft_model(options: EngineOptions) -> nn.Module | None:
    """Return the draft model, unsharded; None without one. Collective over the ranks."""
    way = _way_with_model(options)
    return None if way is None else load_model(way.maker, replace(options, checkpoint=None, quantize=None))


def _draft_runner(options: EngineOptions) -> Runner | None:
    """Return a checked runner of the draft model without a cache; None without a draft model."""
    model = _draft_model(options)
    if model is None:
        return None
    # Quantization of the draft model would affect drafts only, not answers.
    settings = replace(options, quantize=None, max_length=None, is_batch_invariant=False, is_owned=True)
    return _checked_runner(model, settings, None)[0]


def _speculator(options: EngineOptions, draft: Runner | None, num_blocks: int) -> Speculator | None:
    if options.speculate is None:
        return None
    way = SpeculationWay.of(options.speculate)
    if draft is None:
        return Speculator(NgramDrafts(way.longest_match), num_tokens=way.num_tokens)
    draft.allocate(num_blocks)
    model = DraftModel(
        draft,
        num_blocks=num_blocks,
        max_length=longest_of(draft.model.config, None),
        max_tokens=options.max_tokens_per_step,
    )
    return Speculator(model, num_tokens=way.num_tokens)


def _make_runner(
    model: nn.Module, options: EngineOptions, link: StepLink | None, *, bytes_beside: int = 0
) -> tuple[Runner, ServedWeights, int]:
    """Return this rank's checked runner with its cache, its weights, and the number of blocks on all ranks.

    Args:
        model: The model, or this rank's part of it.
        options: Options of the engine.
        link: Link to the other ranks.
        bytes_beside: Memory of the draft model's cache for each block.
    """
    runner, weights = _checked_runner(model, options, link)
    bytes_per_block = runner.bytes_per_block + bytes_beside
    num_blocks = _num_blocks(runner, bytes_per_block, options, free=_free_memory(runner.device, link))
    if link is not None:
        num_blocks = link.least(num_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"kv_memory={options.kv_memory} does not hold one block of {options.block_size} tokens, "
            f"{bytes_per_block} bytes here: give it more"
        )
    runner.allocate(num_blocks)
    return runner, weights, num_blocks


def _checked_runner(
    model: nn.Module, options: EngineOptions, link: StepLink | None
) -> tuple[Runner, ServedWeights]:
    """Return this rank's runner without a cache, after a check of its model, and its weights."""
    device = next(model.parameters()).device
    runner = Runner(
        model, block_size=options.block_size, device=device, is_batch_invariant=options.is_batch_invariant
    )
    with evaluation_mode(model):
        received = None if link is None else receive_sample(link)
        output = runner.find_shapes(received)
        if link is not None:
            send_sample(link, output)
        if options.quantize is not None and not any(
            isinstance(part, QuantizedLinear) for part in model.modules()
        ):
            raise ValueError(
                f"quantize={options.quantize!r}; the model is not quantized: load_model does that"
            )
        max_length = longest_of(model.config, options.max_length)
        with without_rounded_rows(model):
            check_model(runner, _vocab_size(model), max_length, received)
        deltas = load_adapters(runner, options.adapters, received)
        weights = ServedWeights(model, device, is_owned=options.is_owned)
        if options.is_owned:
            weights.note_replaced(make_faster(runner, _vocab_size(model), received, deltas))
        _keep_row_tables(runner, options, link)
        for layer, delta in deltas.items():
            is_replaced = not any(True for _ in (*layer.parameters(), *layer.buffers()))
            parts = None if is_replaced else product_parts(layer)
            if parts is not None:
                runner.pages.replace_in_calls(layer, AdaptedForward(layer, parts, delta))
    if options.kv_dtype == "int8":  # after the check, which needs exact keys and values
        runner.keep_bytes()
    return runner, weights


def _keep_row_tables(runner: Runner, options: EngineOptions, link: StepLink | None) -> None:
    """Build row tables for the products of a model according to the options; see `keep_row_tables`.

    Raises:
        ValueError: `options` require them, but the model is not owned, or no product supports one.
    """
    if not options.is_owned:
        if options.has_row_tables:
            raise ValueError(
                "has_row_tables=True would copy weights of the model in memory, which its owner may change: "
                "give it away with is_owned=True, or serve a folder of it"
            )
        return
    if options.is_batch_invariant or (options.has_row_tables is None and runner.device.type != "cpu"):
        return
    keep_row_tables(
        served_products(runner.model),
        is_wanted=options.has_row_tables,
        free_memory=lambda: _free_memory(runner.device, link),
    )


def _vocab_size(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.vocab_size)


def longest_of(config: Any, wanted: int | None) -> int:
    """Return the maximum number of tokens of a prompt and its answer.

    Models with longrope change the angles of all positions once a sequence exceeds some length. Their window
    ends there, because all sequences of a step share one set of angles.

    Args:
        config: Config of the model.
        wanted: Requested length; None for the window of the model.

    Raises:
        ValueError: `wanted` is more than the window.
    """
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "seq_length"))
    window: int = next((length for length in named if length), 2048)
    angles = getattr(config, "rope_parameters", None) or {}
    for each in (angles, *(part for part in angles.values() if isinstance(part, dict))):
        if each.get("rope_type") == "longrope":
            window = min(window, each.get("original_max_position_embeddings") or window)
    if wanted is not None and wanted > window:
        raise ValueError(f"max_length={wanted}; the window of the model is {window} tokens")
    return wanted or window


def _eos_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of the generation config, else of the config, else of the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        named = getattr(holder, "eos_token_id", None)
        if named is not None and not found:
            found.update(named if isinstance(named, list | tuple) else [named])
    return frozenset(found)


def _num_blocks(runner: Runner, bytes_per_block: int, options: EngineOptions, *, free: int) -> int:
    per_request = -(-longest_of(runner.model.config, options.max_length) // options.block_size)
    memory = options.kv_memory * free if options.kv_memory <= 1 else options.kv_memory
    # Blocks beyond all answers at full length serve prefixes only.
    num_blocks = min(int(memory // bytes_per_block), 2 * options.max_running * per_request)
    size = num_blocks * bytes_per_block
    if size > free:
        raise ValueError(
            f"kv_memory={options.kv_memory:.0f}: the cache would take {size / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free for each rank: give it less"
        )
    return num_blocks


def _free_memory(device: torch.device, link: StepLink | None) -> int:
    """Return the free memory of this rank in bytes; ranks on CPUs share the memory of their machine."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available) // (1 if link is None else link.num_ranks)
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)
