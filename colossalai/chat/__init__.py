"""Chat: training of an assistant on texts (SFT, reward models, DPO) and by rewards (PPO, GRPO).

For users: the methods, `chat_data`, `with_value_head`, and the folders `data` and `losses`.
"""

from colossalai.booster import adapters_off as adapters_off
from colossalai.booster import has_adapters as has_adapters
from colossalai.booster import merge as merge
from colossalai.booster import merged_tensors as merged_tensors
from colossalai.chat import data as data
from colossalai.chat import losses as losses
from colossalai.chat._callbacks import PolicyDriftError as PolicyDriftError
from colossalai.chat._course import Course as Course
from colossalai.chat._fit import FitResult as FitResult
from colossalai.chat._grpo import GRPO as GRPO
from colossalai.chat._heads import ValueModel as ValueModel
from colossalai.chat._heads import with_value_head as with_value_head
from colossalai.chat._methods import DPO as DPO
from colossalai.chat._methods import SFT as SFT
from colossalai.chat._methods import RewardModeling as RewardModeling
from colossalai.chat._ppo import PPO as PPO
from colossalai.chat._pretrained import load_reward_model as load_reward_model
from colossalai.chat._pretrained import save_pretrained as save_pretrained
from colossalai.chat._text_method import ReferredData as ReferredData
from colossalai.chat._text_method import TextMethod as TextMethod
from colossalai.chat.data import ChatData as ChatData
from colossalai.chat.data import chat_data as chat_data
from colossalai.chat.rewards import ModelReward as ModelReward
from colossalai.chat.rewards import RewardError as RewardError
from colossalai.chat.rewards import RewardFunction as RewardFunction
from colossalai.chat.rewards import RewardSum as RewardSum
from colossalai.chat.rewards import TimedReward as TimedReward
from colossalai.chat.rollout import Rollout as Rollout
from colossalai.chat.rollout import RolloutEngine as RolloutEngine
from colossalai.chat.rollout import RolloutOptions as RolloutOptions
