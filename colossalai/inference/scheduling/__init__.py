"""Scheduling: the tokens and requests of the next step, and the blocks of their keys and values."""

from colossalai.inference.scheduling._admission import EngineLimits as EngineLimits
from colossalai.inference.scheduling._admission import refuse_unanswerable as refuse_unanswerable
from colossalai.inference.scheduling._blocks import BlockPool as BlockPool
from colossalai.inference.scheduling._blocks import root_key as root_key
from colossalai.inference.scheduling._pace import PromptPace as PromptPace
from colossalai.inference.scheduling._scheduler import BatchStep as BatchStep
from colossalai.inference.scheduling._scheduler import RunningSequence as RunningSequence
from colossalai.inference.scheduling._scheduler import Scheduler as Scheduler
from colossalai.inference.scheduling._scheduler import SequenceChunk as SequenceChunk
