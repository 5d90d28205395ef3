"""The core that both doors stand on: a plan, its application to a model, and a training step."""

from colossalai.nn import checkpoint as checkpoint
from colossalai.runtime._assemble import assemble as assemble
from colossalai.runtime._assemble import observers_of as observers_of
from colossalai.runtime._assemble import replicas_of as replicas_of
from colossalai.runtime._assemble import tensor_axis_of as tensor_axis_of
from colossalai.runtime._data import DataParallelLoader as DataParallelLoader
from colossalai.runtime._data import DataParallelSampler as DataParallelSampler
from colossalai.runtime._data import make_dataloader as make_dataloader
from colossalai.runtime._data import to_device as to_device
from colossalai.runtime._epoch import EpochWatch as EpochWatch
from colossalai.runtime._epoch import WatchedLoader as WatchedLoader
from colossalai.runtime._pairs import pairs_table as pairs_table
from colossalai.runtime._pairs import refuse_pairs as refuse_pairs
from colossalai.runtime._pipeline import Pipeline as Pipeline
from colossalai.runtime._plan import Plan as Plan
from colossalai.runtime._recompute import apply_recompute as apply_recompute
from colossalai.runtime._recompute import find_blocks as find_blocks
from colossalai.runtime._saving import Resumed as Resumed
from colossalai.runtime._saving import Run as Run
from colossalai.runtime._saving import resume_run as resume_run
from colossalai.runtime._saving import save_run as save_run
from colossalai.runtime._saving import settings_of as settings_of
from colossalai.runtime._saving import with_position as with_position
from colossalai.runtime._step import TrainingStep as TrainingStep
from colossalai.runtime._wrapper import ModelWrapper as ModelWrapper
