"""Rewards of answers: functions, models, and sums of them.

Users write a value (`TimedReward`, `ModelReward`, `RewardSum`, a function or a `ValueModel`); a run builds a
`Scorer` of it. `agreed_rewards` raises an error of one rank's reward on all ranks.
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
