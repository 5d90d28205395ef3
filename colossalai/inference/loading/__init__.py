"""Loading: the config of a service, and the checkpoints of its model."""

from colossalai.inference.loading._metaseq import load_values as load_values
from colossalai.inference.loading._metaseq import open_checkpoint as open_checkpoint
from colossalai.inference.loading._quantized import load_quantized as load_quantized
from colossalai.inference.loading._quantized import load_saved as load_saved
from colossalai.inference.loading._quantized import put_codes as put_codes
from colossalai.inference.loading._quantized import quantize_model as quantize_model
from colossalai.inference.loading._quantized import save_quantized as save_quantized
from colossalai.inference.loading._quantized import saved_way as saved_way
from colossalai.inference.loading._served_weights import ServedWeights as ServedWeights
from colossalai.inference.loading._served_weights import WeightSource as WeightSource
from colossalai.inference.loading._serving_config import ServingConfig as ServingConfig
