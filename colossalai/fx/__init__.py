"""Traces of models under their documented names; training runs the user's own model."""

from colossalai.fx._traced import ColoTracer as ColoTracer
from colossalai.fx._traced import TracedModule as TracedModule
from colossalai.fx._traced import metainfo_trace as metainfo_trace
from colossalai.fx._traced import symbolic_trace as symbolic_trace
