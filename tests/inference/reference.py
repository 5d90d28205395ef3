"""Drawing one token, written plainly: one row, in float64, with a full sort."""

import math

import numpy as np


def probabilities(logits, params, *, prompt_token_ids=(), answer_token_ids=(), banned=(), allowed=None):
    """Return the probabilities of all tokens after every step that `SamplingParams` names, in its order."""
    forbidden = set(banned) if allowed is None else set(banned) | (set(range(len(logits))) - set(allowed))
    biases = [
        -math.inf if token in forbidden else params.logit_bias.get(token, 0) for token in range(len(logits))
    ]
    logits = [float(value) + bias for value, bias in zip(logits, biases, strict=True)]
    for token in {*prompt_token_ids, *answer_token_ids}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(answer_token_ids):
        logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * list(answer_token_ids).count(token)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    weights = np.zeros(len(logits))
    if params.temperature == 0:
        weights[order[0]] = 1
        return weights
    for token in order:
        weights[token] = math.exp(max((logits[token] - best) / params.temperature, -1e4))
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    goal, above = params.top_p * weights.sum(), 0.0
    for token in order:
        weight = weights[token]
        if (above >= goal and params.top_p < 1) or weight < params.min_p:
            weights[token] = 0
        above += weight
    return weights / weights.sum()


def is_drawn(token, chances, uniform, tolerance=1e-10):
    """Return whether `uniform` lies in the part of [0, 1) that is `token`'s, in the order of token ids."""
    before = chances[:token].sum()
    return bool(chances[token] > 0 and before - tolerance <= uniform <= before + chances[token] + tolerance)
