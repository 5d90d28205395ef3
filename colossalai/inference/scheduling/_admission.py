"""Admission: requests that cannot be served are refused before they are queued."""

from dataclasses import dataclass

from colossalai.inference._request import Request, RequestRefused
from colossalai.inference.scheduling._scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of requests to an engine.

    Attributes:
        max_length: Maximum number of tokens of a prompt and its answer together.
        vocab_size: Number of tokens of the vocabulary.
        eos_token_ids: The model's own end tokens.
        max_queue: Maximum number of queued requests; None for no limit.
        adapters: Names of adapters, in the order of their numbers on the ranks.
    """

    max_length: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    max_queue: int | None = None
    adapters: tuple[str, ...] = ()


def refuse_unanswerable(
    request: Request, limits: EngineLimits, scheduler: Scheduler, *, has_tokenizer: bool
) -> None:
    """Check that a request can be served.

    Args:
        request: The request.
        limits: Limits of the engine.
        scheduler: Scheduler with the block pool and the maximum number of running answers.
        has_tokenizer: Whether the engine can decode tokens.

    Raises:
        RequestRefused: `request` is too long for the window or the pool, has unknown tokens or an unknown
            adapter, or needs a text and the engine has no tokenizer.
    """
    length, params = len(request.prompt_token_ids), request.params
    pool = scheduler.pool
    if not length:
        raise RequestRefused("the prompt has no token: give it at least one")
    outside = [token for token in request.prompt_token_ids if not 0 <= token < limits.vocab_size]
    outside += [t for t in (*params.logit_bias, *params.stop_token_ids) if t >= limits.vocab_size]
    if outside:
        raise RequestRefused(f"token {outside[0]} is not one of the {limits.vocab_size} of the model")
    longest = limits.max_length if params.max_tokens == 0 else limits.max_length - 1
    if length > longest:
        raise RequestRefused(
            f"the prompt has {length} tokens, and the model takes {limits.max_length} of prompt and "
            f"answer together: at most {longest} of a prompt"
        )
    wanted = limits.max_length if params.max_tokens is None else params.max_tokens
    whole = min(length + wanted, limits.max_length)
    room = pool.num_blocks * pool.block_size
    if whole > room:
        raise RequestRefused(
            f"prompt and answer may come to {whole} tokens, and all blocks together hold {room}: request "
            "fewer tokens, or give the cache more memory (kv_memory)"
        )
    if params.n > scheduler.max_running:
        raise RequestRefused(f"n={params.n}; at most {scheduler.max_running} answers are made at a time")
    if request.adapter is not None and request.adapter not in limits.adapters:
        known = f"; there are {', '.join(map(repr, limits.adapters))}" if limits.adapters else ""
        raise RequestRefused(f"there is no adapter {request.adapter!r}{known}")
    if not has_tokenizer and (params.stop or params.structure):
        raise RequestRefused("stop strings and structures need a tokenizer, and the model has none")
