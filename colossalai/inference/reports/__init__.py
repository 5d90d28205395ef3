"""Reports on a model before it is served: memory on each rank, and the effect of quantization."""

from colossalai.inference.reports._footprint import ServingMemory as ServingMemory
from colossalai.inference.reports._footprint import StageMemory as StageMemory
from colossalai.inference.reports._footprint import serving_memory as serving_memory
from colossalai.inference.reports._quantization_report import QuantizationReport as QuantizationReport
from colossalai.inference.reports._quantization_report import quantization_report as quantization_report
