"""Each family that tensor parallelism cuts trains as on one process, as the document says."""

import importlib
from functools import partial
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from colossalai.shardformer import has_experts, rule_of, sharded_classes
from tests.shardformer import models
from tests.tiers import further
from tests.turns import grouped, run_each
from tests.verdicts import page
from tests.verdicts.families import COLUMNS, FAMILIES, cut_by, run

TABLE = ("cut by", *COLUMNS)


def cells() -> list[Any]:
    """Return the cells that are run: one of each row in `make test`; dashes are derived below."""
    listed = page.read("family", TABLE)
    return [
        (column, label) if column == family.first else further(column, label)
        for label, family in FAMILIES.items()
        for column in COLUMNS
        if listed.get(label, {}).get(column) != "-"
    ]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "cells"), grouped(cells(), lambda *_: 2))
def test_a_cell_is_what_the_document_says(num_ranks: int, cells: list[tuple[str, str]]) -> None:
    listed = page.read("family", TABLE)
    for (column, label), of_ranks in zip(cells, run_each(num_ranks, run, cells), strict=True):
        assert set(of_ranks) == {listed[label][column]}, (label, column)


@pytest.mark.unit
def test_the_document_has_a_row_for_each_family() -> None:
    listed = page.read("family", TABLE)
    assert list(listed) == list(FAMILIES), "python -m tests.verdicts"
    for label, family in FAMILIES.items():
        model = family.build()
        assert listed[label]["cut by"] == cut_by(model), label
        assert (listed[label]["ep"] == "-") != has_experts(model), label
        assert family.first in COLUMNS, label
        assert listed[label][family.first] != "-", label


def family_of(kind: type | str) -> str:
    """Return the folder of transformers that has a class; empty for another class."""
    name = kind if isinstance(kind, str) else kind.__module__
    return name.split(".")[2] if name.startswith("transformers.models.") else ""


def is_planned(kind: type[nn.Module]) -> bool:
    """Return whether a class of models has a plan by which tensor parallelism cuts it."""
    config = getattr(kind, "config_class", None)
    return bool(getattr(config, "base_model_tp_plan", None))


@pytest.mark.unit
def test_each_rule_that_cuts_is_met_by_a_row() -> None:
    modules = [part for family in FAMILIES.values() for part in family.build().modules()]
    met = {rule_of(part) for part in modules}
    kinds = {base for part in modules for base in type(part).__mro__}
    folders = {family_of(kind) for kind in kinds}
    for name in filter(family_of, sharded_classes()):
        home, _, own_name = name.rpartition(".")
        kind = getattr(importlib.import_module(home), own_name)
        rule = rule_of(kind.__new__(kind))
        assert rule is not None
        if rule.cuts or is_planned(kind):
            assert family_of(name) in folders, f"{name}: FAMILIES lacks its family"
        if rule.cuts and not issubclass(kind, PreTrainedModel):
            assert kind in kinds, f"{name}: no model of FAMILIES has it"
            assert rule in met


@pytest.mark.unit
def test_each_planned_model_of_the_tests_has_a_row() -> None:
    builders = {family.build for family in FAMILIES.values()}
    others = {models.gpt2_of_four_blocks, models.wide_opt, models.mixtral_with_lora, models.planned}
    for name, function in vars(models).items():
        is_own = getattr(function, "__module__", "") == models.__name__ and not name.startswith("_")
        returns = getattr(function, "__annotations__", {}).get("return") if is_own else None
        if isinstance(function, partial) or returns is nn.Module:
            assert function in builders | others, f"{name}: FAMILIES lacks it"
