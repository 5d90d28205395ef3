"""Rewards: how good answers are, by functions, models, and sums of them.

What users write is a value (`TimedReward`, `ModelReward`, `RewardSum`, a function or a `ValueModel`); at work
in a run it is a `Scorer`. `agreed_rewards` is where ranks hear of one that failed.
"""

from colossalai.chat.rewards._scorers import AnswerText as AnswerText
from colossalai.chat.rewards._scorers import ModelReward as ModelReward
from colossalai.chat.rewards._scorers import Reward as Reward
from colossalai.chat.rewards._scorers import RewardError as RewardError
from colossalai.chat.rewards._scorers import RewardFunction as RewardFunction
from colossalai.chat.rewards._scorers import RewardSum as RewardSum
from colossalai.chat.rewards._scorers import Scores as Scores
from colossalai.chat.rewards._scorers import TimedReward as TimedReward
from colossalai.chat.rewards._scorers import agreed_rewards as agreed_rewards
from colossalai.chat.rewards._scorers import check_reward as check_reward
from colossalai.chat.rewards._scorers import parts_of as parts_of
from colossalai.chat.rewards._scorers import reward_records as reward_records
from colossalai.chat.rewards._scorers import scorer_of as scorer_of
from colossalai.chat.rewards._timed_calls import RewardCallError as RewardCallError
