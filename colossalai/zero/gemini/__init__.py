"""Gemini: ZeRO stage 3 in chunks of parameters, which are gathered where they are used."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.zero.gemini._method import InChunks as InChunks

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that have not landed
