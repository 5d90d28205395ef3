"""Schedules as values: generated, read, validated and simulated without a process."""

from colossalai.pipeline.schedules._action import Action as Action
from colossalai.pipeline.schedules._action import Op as Op
from colossalai.pipeline.schedules._action import Schedule as Schedule
from colossalai.pipeline.schedules._csv import read_schedule as read_schedule
from colossalai.pipeline.schedules._csv import write_schedule as write_schedule
from colossalai.pipeline.schedules._generators import SCHEDULES as SCHEDULES
from colossalai.pipeline.schedules._generators import forward_only as forward_only
from colossalai.pipeline.schedules._generators import make_schedule as make_schedule
from colossalai.pipeline.schedules._lowered import ScheduleStep as ScheduleStep
from colossalai.pipeline.schedules._lowered import StepKind as StepKind
from colossalai.pipeline.schedules._lowered import lower as lower
from colossalai.pipeline.schedules._messages import Message as Message
from colossalai.pipeline.schedules._messages import MessageKind as MessageKind
from colossalai.pipeline.schedules._messages import message_needed_by as message_needed_by
from colossalai.pipeline.schedules._messages import message_sent_by as message_sent_by
from colossalai.pipeline.schedules._messages import messages_between as messages_between
from colossalai.pipeline.schedules._simulate import Costs as Costs
from colossalai.pipeline.schedules._simulate import Replay as Replay
from colossalai.pipeline.schedules._simulate import Span as Span
from colossalai.pipeline.schedules._simulate import Timeline as Timeline
from colossalai.pipeline.schedules._simulate import simulate as simulate
from colossalai.pipeline.schedules._validate import ScheduleError as ScheduleError
from colossalai.pipeline.schedules._validate import validate as validate
