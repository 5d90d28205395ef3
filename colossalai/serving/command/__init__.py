"""`colossalai serve`: options and a config file, lowered to a plan, ranks, an engine and an answer cache."""

from colossalai.serving.command._answer_cache import AnswerCache as AnswerCache
from colossalai.serving.command._profanity import ProfanityFilter as ProfanityFilter
from colossalai.serving.command._profanity import ProfanityWords as ProfanityWords
from colossalai.serving.command._serve import ServeOptions as ServeOptions
from colossalai.serving.command._serve import serve as serve
