"""What a Trainer does beside training: hooks for metrics, schedules, checkpoints and logs."""

from colossalai.trainer.hooks._base import BaseHook as BaseHook
from colossalai.trainer.hooks._checkpoint_hook import SaveCheckpointHook as SaveCheckpointHook
from colossalai.trainer.hooks._log_hooks import LogMemoryByEpochHook as LogMemoryByEpochHook
from colossalai.trainer.hooks._log_hooks import LogMetricByEpochHook as LogMetricByEpochHook
from colossalai.trainer.hooks._log_hooks import LogMetricByStepHook as LogMetricByStepHook
from colossalai.trainer.hooks._log_hooks import LogTimingByEpochHook as LogTimingByEpochHook
from colossalai.trainer.hooks._lr_scheduler_hook import LRSchedulerHook as LRSchedulerHook
from colossalai.trainer.hooks._metric_hooks import AccuracyHook as AccuracyHook
from colossalai.trainer.hooks._metric_hooks import LossHook as LossHook
from colossalai.trainer.hooks._metric_hooks import MetricHook as MetricHook
from colossalai.trainer.hooks._metric_hooks import ThroughputHook as ThroughputHook
from colossalai.trainer.hooks._tensorboard_hook import TensorboardHook as TensorboardHook
