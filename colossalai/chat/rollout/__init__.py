"""Rollouts: answers of a model that is being trained, drawn on the package's own engine.

`RolloutEngine` is a `Sampler`, which answers, in this process or in one of Ray, and `EngineWeights`, where
its values come from: the parameters in training, or whole tensors that each sync puts together anew.
"""

from colossalai.chat.rollout._engine import RolloutEngine as RolloutEngine
from colossalai.chat.rollout._engine import RolloutOptions as RolloutOptions
from colossalai.chat.rollout._sampler import Rollout as Rollout
from colossalai.chat.rollout._weights import config_of as config_of
