"""Sampling of tokens from logits, detokenization, structured output and the prompts of instructions."""

from colossalai.inference.sampling._draws import HAS_INFINITY as HAS_INFINITY
from colossalai.inference.sampling._draws import HAS_NAN as HAS_NAN
from colossalai.inference.sampling._draws import HAS_NO_TOKEN as HAS_NO_TOKEN
from colossalai.inference.sampling._draws import Draw as Draw
from colossalai.inference.sampling._draws import Drawn as Drawn
from colossalai.inference.sampling._draws import Draws as Draws
from colossalai.inference.sampling._draws import accepted as accepted
from colossalai.inference.sampling._draws import draw_of as draw_of
from colossalai.inference.sampling._draws import fresh_seed as fresh_seed
from colossalai.inference.sampling._draws import uniform_of as uniform_of
from colossalai.inference.sampling._instructions import ALPACA_STOP as ALPACA_STOP
from colossalai.inference.sampling._instructions import alpaca_prompt as alpaca_prompt
from colossalai.inference.sampling._instructions import dialogue_text as dialogue_text
from colossalai.inference.sampling._sampling import draw_tokens as draw_tokens
from colossalai.inference.sampling._sampling import logprobs_of as logprobs_of
from colossalai.inference.sampling._structured import StructureCompiler as StructureCompiler
from colossalai.inference.sampling._structured import StructureMatcher as StructureMatcher
from colossalai.inference.sampling._text import Stopped as Stopped
from colossalai.inference.sampling._text import TextStream as TextStream
