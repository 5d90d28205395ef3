"""Losses of fine-tuning and of RLHF: pure functions of tensors.

`logp` is always the log-probability of the given token, (batch, length), and `mask` selects the tokens that
count. Inputs of a target (`old_logp`, `advantages`, `returns`, the reference) get no gradient. Means take the
divisor of a whole batch, so that the losses of microbatches, or of ranks, add up to the loss of the batch.
"""

from colossalai.chat.losses._grpo import group_advantages as group_advantages
from colossalai.chat.losses._grpo import grpo_loss as grpo_loss
from colossalai.chat.losses._kl import kl as kl
from colossalai.chat.losses._kl import sequence_rewards as sequence_rewards
from colossalai.chat.losses._kl import token_rewards as token_rewards
from colossalai.chat.losses._language import entropy as entropy
from colossalai.chat.losses._language import sequence_logprobs as sequence_logprobs
from colossalai.chat.losses._language import sft_loss as sft_loss
from colossalai.chat.losses._language import token_logprobs as token_logprobs
from colossalai.chat.losses._ppo import gae as gae
from colossalai.chat.losses._ppo import ppo_policy_loss as ppo_policy_loss
from colossalai.chat.losses._ppo import ptx_loss as ptx_loss
from colossalai.chat.losses._ppo import value_loss as value_loss
from colossalai.chat.losses._ppo import whiten as whiten
from colossalai.chat.losses._preference import DPOResult as DPOResult
from colossalai.chat.losses._preference import dpo_loss as dpo_loss
from colossalai.chat.losses._preference import log_exp_loss as log_exp_loss
from colossalai.chat.losses._preference import log_sig_loss as log_sig_loss

__all__ = [
    "DPOResult",
    "dpo_loss",
    "entropy",
    "gae",
    "group_advantages",
    "grpo_loss",
    "kl",
    "log_exp_loss",
    "log_sig_loss",
    "ppo_policy_loss",
    "ptx_loss",
    "sequence_logprobs",
    "sequence_rewards",
    "sft_loss",
    "token_logprobs",
    "token_rewards",
    "value_loss",
    "whiten",
]
