"""Text from a language model."""

import torch
from tokenizers import Tokenizer
from torch import nn


@torch.no_grad()
def sample_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Continue a prompt, token by token; the random states of the training are left alone.

    Args:
        model: Maps token ids (batch, seq) to logits (batch, seq, vocab).
        tokenizer: Its tokenizer.
        prompt: The beginning.
        num_tokens: Tokens to add.
        context: The most tokens that the model sees at once.
        temperature: Divides the logits; below 1 is bolder.
        top_k: Only so many of the likeliest tokens are drawn.
        seed: Seed of the drawing.

    Returns:
        The prompt and its continuation.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu()
        likeliest = logits.topk(min(top_k, logits.numel()))
        weights = torch.softmax(likeliest.values / temperature, dim=-1)
        ids.append(int(likeliest.indices[torch.multinomial(weights, 1, generator=generator)]))
    model.train(was_training)
    return tokenizer.decode(ids)
