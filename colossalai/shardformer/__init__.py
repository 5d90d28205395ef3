"""Tensor parallelism for models that were not written for it: those of Hugging Face transformers."""

from colossalai.shardformer._experts import has_experts as has_experts
from colossalai.shardformer._experts import keep_float32 as keep_float32
from colossalai.shardformer._experts import shard_experts as shard_experts
from colossalai.shardformer._fused_loss import fuse_losses as fuse_losses
from colossalai.shardformer._registry import register_rule as register_rule
from colossalai.shardformer._registry import rule_of as rule_of
from colossalai.shardformer._registry import sharded_classes as sharded_classes
from colossalai.shardformer._shard import can_shard as can_shard
from colossalai.shardformer._shard import shard_model as shard_model
from colossalai.shardformer.policies import Policy as Policy
from colossalai.shardformer.policies import Rule as Rule
