"""Faster parts for inference-only models: packed and quantized products, and lean blocks."""

from colossalai.inference.products._delta import AdaptedForward as AdaptedForward
from colossalai.inference.products._delta import Deltas as Deltas
from colossalai.inference.products._delta import LinearDelta as LinearDelta
from colossalai.inference.products._faster import FasterPart as FasterPart
from colossalai.inference.products._faster import FastModel as FastModel
from colossalai.inference.products._faster import make_faster as make_faster
from colossalai.inference.products._faster import served_products as served_products
from colossalai.inference.products._products import fewest_rows as fewest_rows
from colossalai.inference.products._quantized_linear import ProductParts as ProductParts
from colossalai.inference.products._quantized_linear import QuantizedLinear as QuantizedLinear
from colossalai.inference.products._quantized_linear import is_packed as is_packed
from colossalai.inference.products._quantized_linear import product_parts as product_parts
from colossalai.inference.products._quantized_linear import without_rounded_rows as without_rounded_rows
from colossalai.inference.products._quantized_weight import QuantizationWay as QuantizationWay
from colossalai.inference.products._quantized_weight import QuantizedWeight as QuantizedWeight
from colossalai.inference.products._quantized_weight import quantize as quantize
from colossalai.inference.products._row_tables import FloatRowTable as FloatRowTable
from colossalai.inference.products._row_tables import keep_row_tables as keep_row_tables
from colossalai.inference.products._row_tables import row_table_bytes as row_table_bytes
