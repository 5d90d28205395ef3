"""Paged KV cache: attention over blocks, paged calls of a model, and steps on one rank."""

from colossalai.inference.paging._adapter_rows import AdapterRows as AdapterRows
from colossalai.inference.paging._attention import AttentionOptions as AttentionOptions
from colossalai.inference.paging._attention import PagedStep as PagedStep
from colossalai.inference.paging._cache import FloatLayerCache as FloatLayerCache
from colossalai.inference.paging._cache import LayerShape as LayerShape
from colossalai.inference.paging._calls import ShapeProbe as ShapeProbe
from colossalai.inference.paging._calls import adapter_rows as adapter_rows
from colossalai.inference.paging._calls import current_call as current_call
from colossalai.inference.paging._own_gpt import as_served as as_served
from colossalai.inference.paging._runner import Runner as Runner
from colossalai.inference.paging._runner import StepArrays as StepArrays
from colossalai.inference.paging._runner import check_layer_types as check_layer_types
from colossalai.inference.paging._runner import check_model as check_model
from colossalai.inference.paging._runner import pack_arrays as pack_arrays
from colossalai.inference.paging._runner import random_like as random_like
from colossalai.inference.paging._runner import unpack_arrays as unpack_arrays
