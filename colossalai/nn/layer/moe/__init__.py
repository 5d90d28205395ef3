"""Mixture of experts: experts spread over ranks, and tokens that travel to them."""

from colossalai.nn.layer.moe._dispatch import EXPERT_AXES as EXPERT_AXES
from colossalai.nn.layer.moe._dispatch import dispatch as dispatch
from colossalai.nn.layer.moe._grouped import grouped_linear as grouped_linear
