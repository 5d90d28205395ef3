"""Speculative decoding: drafts of the next tokens, which a step of the model accepts or rejects."""

from colossalai.inference.speculation._draft_model import DraftModel as DraftModel
from colossalai.inference.speculation._drafts import DraftMaker as DraftMaker
from colossalai.inference.speculation._drafts import NgramDrafts as NgramDrafts
from colossalai.inference.speculation._drafts import SpeculationWay as SpeculationWay
from colossalai.inference.speculation._speculator import RowPace as RowPace
from colossalai.inference.speculation._speculator import Speculator as Speculator
