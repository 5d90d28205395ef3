"""What is known of a served model without serving it: its memory on each rank, what few bits do to it."""

from colossalai.inference.reports._footprint import ServingMemory as ServingMemory
from colossalai.inference.reports._footprint import StageMemory as StageMemory
from colossalai.inference.reports._footprint import serving_memory as serving_memory
from colossalai.inference.reports._quantization_report import QuantizationReport as QuantizationReport
from colossalai.inference.reports._quantization_report import quantization_report as quantization_report
