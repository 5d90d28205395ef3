"""Build layers, models and handlers from a config, and cut a model into pipeline stages."""

from colossalai.compat.builder._config import build_from_config as build_from_config
from colossalai.compat.builder._config import build_from_registry as build_from_registry
from colossalai.compat.builder._pipeline import build_pipeline_model as build_pipeline_model
from colossalai.compat.builder._pipeline import build_pipeline_model_from_cfg as build_pipeline_model_from_cfg
from colossalai.engine import build_gradient_handler as build_gradient_handler
