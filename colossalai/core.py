"""The global context under its documented name."""

from colossalai.context import global_context as global_context
