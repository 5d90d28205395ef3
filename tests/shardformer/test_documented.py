"""The document lists the models that are tested in tensor parallelism, and by how many ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from colossalai.shardformer import rule_of
from colossalai.shardformer._tp_plan import rules_of_plans
from tests.shardformer.test_parity import CELLS, TENSOR

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/features/transformers.md"


def documented_rows() -> list[str]:
    """Return the table of what is tested here, as it stands in the document."""
    sizes: dict[Callable[[], nn.Module], set[int]] = {}
    for cell in CELLS:
        build, _, config, _ = getattr(cell, "values", cell)
        sizes.setdefault(build, set()).add(config.get("parallel", {}).get("tensor", TENSOR)["size"])
    rows: dict[tuple[str, str], set[int]] = {}
    for build, found in sizes.items():
        model = build()
        kind = next(type(part).__name__ for part in model.modules() if hasattr(part, "config"))
        ruled = {part for part in model.modules() if (rule := rule_of(part)) and rule.cuts}
        how = "its plan" if rules_of_plans(model, ruled=ruled) else "rules"
        rows.setdefault((how, kind), set()).update(found)
    ordered = sorted(rows.items(), key=lambda row: (row[0][0] != "rules", row[0][1]))
    return [f"| `{kind}` | {how} | {', '.join(map(str, sorted(found)))} |" for (how, kind), found in ordered]


def test_the_document_lists_what_is_tested() -> None:
    text = DOCUMENT.read_text()
    _, _, table = text.partition("| model | cut by | tensor-parallel ranks |\n| --- | --- | --- |\n")
    listed = table.partition("\n\n")[0].splitlines()
    assert listed == documented_rows(), "\n".join(documented_rows())
