"""Tensor parallelism for models that were not written for it: by rules of classes, or of a plan by name."""

from colossalai.shardformer._batch_norm import follow_batches_once as follow_batches_once
from colossalai.shardformer._batch_norm import sync_batch_norms as sync_batch_norms
from colossalai.shardformer._experts import expert_parameters as expert_parameters
from colossalai.shardformer._experts import experts_of as experts_of
from colossalai.shardformer._experts import experts_to_cut as experts_to_cut
from colossalai.shardformer._experts import has_experts as has_experts
from colossalai.shardformer._experts import keep_float32 as keep_float32
from colossalai.shardformer._experts import shard_experts as shard_experts
from colossalai.shardformer._fused_loss import fuse_losses as fuse_losses
from colossalai.shardformer._layers import LinearParts as LinearParts
from colossalai.shardformer._layers import linear_parts as linear_parts
from colossalai.shardformer._named_rules import NamedRules as NamedRules
from colossalai.shardformer._named_rules import refuse_unknown_names as refuse_unknown_names
from colossalai.shardformer._named_rules import rule_by_name as rule_by_name
from colossalai.shardformer._registry import register_rule as register_rule
from colossalai.shardformer._registry import rule_of as rule_of
from colossalai.shardformer._registry import sharded_classes as sharded_classes
from colossalai.shardformer._shard import can_shard as can_shard
from colossalai.shardformer._shard import check_rule as check_rule
from colossalai.shardformer._shard import check_shards as check_shards
from colossalai.shardformer._shard import params_to_cut as params_to_cut
from colossalai.shardformer._shard import shard_model as shard_model
from colossalai.shardformer.policies import Policy as Policy
from colossalai.shardformer.policies import Rule as Rule
