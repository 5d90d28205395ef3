"""Mixture of experts: experts spread over ranks, and tokens that travel to them.

`save_moe_model` and `load_moe_model` are aliases (`NAMES` of `colossalai._aliases`).
"""

from typing import Any

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.nn.layer.moe._balance import auxiliary_loss as auxiliary_loss
from colossalai.nn.layer.moe._balance import bias_updates as bias_updates
from colossalai.nn.layer.moe._dispatch import EXPERT_AXES as EXPERT_AXES
from colossalai.nn.layer.moe._dispatch import dispatch as dispatch
from colossalai.nn.layer.moe._dispatch import dispatch_here as dispatch_here
from colossalai.nn.layer.moe._experts import Experts as Experts
from colossalai.nn.layer.moe._experts import MoeExperts as MoeExperts
from colossalai.nn.layer.moe._feed_forward import FFNExperts as FFNExperts
from colossalai.nn.layer.moe._feed_forward import TPExperts as TPExperts
from colossalai.nn.layer.moe._feed_forward import build_ffn_experts as build_ffn_experts
from colossalai.nn.layer.moe._grouped import grouped_linear as grouped_linear
from colossalai.nn.layer.moe._layer import MoeLayer as MoeLayer
from colossalai.nn.layer.moe._layer import MoeModule as MoeModule
from colossalai.nn.layer.moe._losses import AddsLosses as AddsLosses
from colossalai.nn.layer.moe._losses import LossCollector as LossCollector
from colossalai.nn.layer.moe._losses import collect_losses as collect_losses
from colossalai.nn.layer.moe._losses import collector_of_stages as collector_of_stages
from colossalai.nn.layer.moe._router import MoeRouter as MoeRouter
from colossalai.nn.layer.moe._router import NormalNoiseGenerator as NormalNoiseGenerator
from colossalai.nn.layer.moe._router import Routes as Routes
from colossalai.nn.layer.moe._router import UniformNoiseGenerator as UniformNoiseGenerator
from colossalai.nn.layer.moe._top import Top1Router as Top1Router
from colossalai.nn.layer.moe._top import Top2Router as Top2Router
from colossalai.nn.layer.moe._top import TopKRouter as TopKRouter


def __getattr__(name: str) -> Any:
    """Import an alias at its first access (PEP 562)."""
    return find_name(__name__, NAMES[__name__], name)
