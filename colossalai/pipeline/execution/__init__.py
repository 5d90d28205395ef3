"""What runs a schedule: actions in order, messages between ranks, microbatches, split backwards."""

from colossalai.pipeline.execution._executor import LossCollection as LossCollection
from colossalai.pipeline.execution._executor import PipelineExecutor as PipelineExecutor
from colossalai.pipeline.execution._executor import PipelineResult as PipelineResult
from colossalai.pipeline.execution._nested import merge_outputs as merge_outputs
from colossalai.pipeline.execution._nested import microbatch_weights as microbatch_weights
from colossalai.pipeline.execution._nested import num_samples_in as num_samples_in
from colossalai.pipeline.execution._nested import split_batch as split_batch
