"""`colossalai memory`: memory of a rank in training, serving or RLHF, without weights or ranks."""

from colossalai.cli._memory._command import show_memory as show_memory
from colossalai.cli._memory._rlhf import show_rlhf as show_rlhf
from colossalai.cli._memory._serving import show_serving as show_serving
from colossalai.cli._memory._shape import build_model as build_model
from colossalai.cli._memory._shape import shape_of as shape_of
from colossalai.cli._memory._trace import trace_memory as trace_memory
