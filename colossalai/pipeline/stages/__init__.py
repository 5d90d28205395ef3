"""Models cut into stages: by hand, by the order of their layers, or along their stack of blocks."""

from colossalai.pipeline.stages._chunks import ChunkList as ChunkList
from colossalai.pipeline.stages._chunks import has_full_names as has_full_names
from colossalai.pipeline.stages._layer_list import PartitionMethod as PartitionMethod
from colossalai.pipeline.stages._layer_list import cut_sequential as cut_sequential
from colossalai.pipeline.stages._partition import measure_weights as measure_weights
from colossalai.pipeline.stages._partition import partition_balanced as partition_balanced
from colossalai.pipeline.stages._partition import partition_uniform as partition_uniform
from colossalai.pipeline.stages._pipelinable import PipelinableContext as PipelinableContext
from colossalai.pipeline.stages._placeholders import is_elsewhere as is_elsewhere
from colossalai.pipeline.stages._split_model import can_cut_unseen as can_cut_unseen
from colossalai.pipeline.stages._split_model import cut_model as cut_model
from colossalai.pipeline.stages._stage import ModelStage as ModelStage
from colossalai.pipeline.stages._stage import PartOfStack as PartOfStack
from colossalai.pipeline.stages._stage import PipelineStage as PipelineStage
from colossalai.pipeline.stages._stage import caller_of as caller_of
from colossalai.pipeline.stages._stage import tied_parameters as tied_parameters
from colossalai.pipeline.stages._tied_weights import (
    PipelineSharedModuleWrapper as PipelineSharedModuleWrapper,
)
from colossalai.pipeline.stages._tied_weights import is_counted as is_counted
from colossalai.pipeline.stages._tied_weights import share_of as share_of
from colossalai.pipeline.stages._tied_weights import share_parameter as share_parameter
from colossalai.pipeline.stages._tied_weights import shared_axis as shared_axis
from colossalai.pipeline.stages._tied_weights import sync_shared_grads as sync_shared_grads
