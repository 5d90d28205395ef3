"""Hooks of a Trainer: metrics, schedules, checkpoints and logs."""

from colossalai.trainer._base_hook import BaseHook as BaseHook
from colossalai.trainer.hooks._checkpoint_hook import SaveCheckpointHook as SaveCheckpointHook
from colossalai.trainer.hooks._log_hooks import LogMemoryByEpochHook as LogMemoryByEpochHook
from colossalai.trainer.hooks._log_hooks import LogMetricByEpochHook as LogMetricByEpochHook
from colossalai.trainer.hooks._log_hooks import LogMetricByStepHook as LogMetricByStepHook
from colossalai.trainer.hooks._log_hooks import LogTimingByEpochHook as LogTimingByEpochHook
from colossalai.trainer.hooks._logger_hook import LoggerHook as LoggerHook
from colossalai.trainer.hooks._logger_hook import TensorboardHook as TensorboardHook
from colossalai.trainer.hooks._lr_scheduler_hook import LRSchedulerHook as LRSchedulerHook
from colossalai.trainer.hooks._metric_hooks import AccuracyHook as AccuracyHook
from colossalai.trainer.hooks._metric_hooks import LossHook as LossHook
from colossalai.trainer.hooks._metric_hooks import MetricHook as MetricHook
from colossalai.trainer.hooks._metric_hooks import ThroughputHook as ThroughputHook
from colossalai.trainer.hooks._profiler_hook import ProfilerHook as ProfilerHook
from colossalai.trainer.hooks._states import resume_state as resume_state
from colossalai.trainer.hooks._watching_hooks import EarlyStoppingHook as EarlyStoppingHook
from colossalai.trainer.hooks._watching_hooks import MetricWatchHook as MetricWatchHook
from colossalai.trainer.hooks._watching_hooks import SaveBestHook as SaveBestHook
