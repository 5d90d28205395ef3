"""Inference: batched generation of a language model, on the ranks that trained it.

For users: `LLM` and `SamplingParams`. For the package: `Service`, with its requests and deltas.
"""

from colossalai.inference._build import check_ranks as check_ranks
from colossalai.inference._build import engine_of_ranks as engine_of_ranks
from colossalai.inference._collective import CollectiveEngine as CollectiveEngine
from colossalai.inference._llm import LLM as LLM
from colossalai.inference._load import EngineOptions as EngineOptions
from colossalai.inference._load import empty_part as empty_part
from colossalai.inference._load import load_model as load_model
from colossalai.inference._load import load_tokenizer as load_tokenizer
from colossalai.inference._request import Completion as Completion
from colossalai.inference._request import Delta as Delta
from colossalai.inference._request import EngineStopped as EngineStopped
from colossalai.inference._request import FinishReason as FinishReason
from colossalai.inference._request import QueueFull as QueueFull
from colossalai.inference._request import Request as Request
from colossalai.inference._request import RequestFailed as RequestFailed
from colossalai.inference._request import RequestOutput as RequestOutput
from colossalai.inference._request import RequestRefused as RequestRefused
from colossalai.inference._request import SamplingParams as SamplingParams
from colossalai.inference._request import Structure as Structure
from colossalai.inference._request import TokenLogprobs as TokenLogprobs
from colossalai.inference._request import Usage as Usage
from colossalai.inference._service import EngineStats as EngineStats
from colossalai.inference._service import Listener as Listener
from colossalai.inference._service import ModelInfo as ModelInfo
from colossalai.inference._service import Service as Service
from colossalai.inference._service import ServiceInFront as ServiceInFront
from colossalai.inference._threaded import ThreadedEngine as ThreadedEngine
from colossalai.inference.loading import ServingConfig as ServingConfig
from colossalai.inference.loading import save_quantized as save_quantized
from colossalai.inference.models import base_of_adapters as base_of_adapters
from colossalai.inference.reports import QuantizationReport as QuantizationReport
from colossalai.inference.reports import ServingMemory as ServingMemory
from colossalai.inference.reports import StageMemory as StageMemory
from colossalai.inference.reports import quantization_report as quantization_report
from colossalai.inference.reports import serving_memory as serving_memory
from colossalai.inference.sampling import ALPACA_STOP as ALPACA_STOP
from colossalai.inference.sampling import alpaca_prompt as alpaca_prompt
from colossalai.inference.sampling import dialogue_text as dialogue_text
