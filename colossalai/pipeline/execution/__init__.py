"""Execution of schedules: the executor, messages between ranks, microbatches, split backwards."""

from colossalai.pipeline.execution._executor import LossCollection as LossCollection
from colossalai.pipeline.execution._executor import PipelineExecutor as PipelineExecutor
from colossalai.pipeline.execution._executor import PipelineResult as PipelineResult
from colossalai.pipeline.execution._microbatches import BatchDim as BatchDim
from colossalai.pipeline.execution._microbatches import BatchTensor as BatchTensor
from colossalai.pipeline.execution._microbatches import Microbatches as Microbatches
from colossalai.pipeline.execution._microbatches import RepeatedTensors as RepeatedTensors
from colossalai.pipeline.execution._microbatches import check_batch_dim as check_batch_dim
from colossalai.pipeline.execution._microbatches import cut_batch as cut_batch
from colossalai.pipeline.execution._microbatches import merge_outputs as merge_outputs
from colossalai.pipeline.execution._microbatches import microbatch_weights as microbatch_weights
from colossalai.pipeline.execution._microbatches import num_samples_in as num_samples_in
from colossalai.pipeline.execution._microbatches import output_dim_of as output_dim_of
from colossalai.pipeline.execution._microbatches import split_batch as split_batch
