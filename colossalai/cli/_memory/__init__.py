"""`colossalai memory`: what a rank will hold in training, without the weights and without the ranks."""

from colossalai.cli._memory._command import show_memory as show_memory
from colossalai.cli._memory._trace import trace_memory as trace_memory
