"""Colossal-Auto: a plan for a model, a machine and a memory budget."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.auto_parallel._make import make_plan as make_plan
from colossalai.auto_parallel._plan import AutoPlan as AutoPlan
from colossalai.auto_parallel._plan import given_plan as given_plan
from colossalai.auto_parallel._plan import load_plan as load_plan

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names of the interface without code so far
