"""A training state that was saved in any layout loads in any other, and the run goes on as if never stopped.

With FULL_MATRIX=1 in the environment (`make matrix`) every pair of layouts; else each is saved and loaded
with a few others, the layouts of eight ranks with two, and goes on for a step less.
"""

from pathlib import Path

import pytest

from tests.checkpoint_io.layouts import IS_FULL, LAYOUTS, layout_of, load, mean_losses, save
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10  # float64: another order of summation, and nothing else
NAMES = list(LAYOUTS)
# What each layout loads beside what the next two on the list have saved; these take too long for eight ranks.
HARD = {
    "one": ["3d", "pp2-tp2", "zero2-tp2", "fsdp"],
    "3d": ["fsdp", "zero1"],
    "2.5d": ["3d", "zero2-tp2"],
    "pp2-tp2": ["2d", "fsdp", "zero1"],
    "zero1": ["3d", "pp2"],
    "zero2-tp2": ["2.5d", "zero1", "pp2-tp2"],
    "fsdp": ["2d", "zero2-tp2"],
    "gemini2": ["3d", "pp2-tp2", "zero2-tp2", "fsdp"],
    "gemini2-tp2": ["2d", "zero1", "gemini2"],
    "2d": ["gemini2-tp2"],
}


def sources_of(name: str) -> list[str]:
    if IS_FULL:
        return NAMES
    place = NAMES.index(name)
    following = [] if LAYOUTS[name].num_ranks > 4 else (NAMES * 2)[place + 1 : place + 3]
    return list(dict.fromkeys([*following, *HARD.get(name, [])]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Every layout trained and saved: where, and the losses of the runs that were not stopped."""
    folder = tmp_path_factory.mktemp("matrix")
    return folder, {
        name: mean_losses(run_ranks(save, layout.num_ranks, name, folder)) for name, layout in LAYOUTS.items()
    }


def test_the_layouts_train_alike(saved: tuple[Path, dict[str, list[float]]]) -> None:
    _, losses = saved
    for name, of_layout in losses.items():
        assert of_layout == pytest.approx(losses["one"], rel=TOLERANCE), name
    assert len(set(losses["one"])) == len(losses["one"])


@pytest.mark.parametrize("name", NAMES)
def test_loaded_from_other_layouts(name: str, saved: tuple[Path, dict[str, list[float]]]) -> None:
    folder, losses = saved
    of_ranks = run_ranks(load, LAYOUTS[name].num_ranks, name, sources_of(name), folder)
    for source in sources_of(name):
        found = mean_losses([of_rank[source] for of_rank in of_ranks])
        assert found == pytest.approx(losses[source], rel=TOLERANCE), source


# The losses of float32 are those of another order of summation, and of no other update.
PAIRS = [
    ("pp2", "interleaved", TOLERANCE),
    ("interleaved", "tp2", TOLERANCE),
    ("sequence", "2d", TOLERANCE),
    ("zero1", "sequence", TOLERANCE),
    ("2d", "zero1-pp2", TOLERANCE),
    ("zero1-pp2", "fsdp-tp2", TOLERANCE),
    ("fsdp-tp2", "one", TOLERANCE),
    ("gemini1", "gemini4", TOLERANCE),
    ("gemini4", "gemini2-pp2", TOLERANCE),
    ("gemini2-pp2", "gemini1", TOLERANCE),
    ("lamb-zero2", "lamb", TOLERANCE),
    ("lamb", "lamb-zero2", TOLERANCE),
    ("disk", "hybrid", 1e-5),
    ("hybrid", "disk", 1e-5),
]


@pytest.mark.parametrize(("source", "name", "tolerance"), PAIRS)
def test_further_pairs(
    source: str, name: str, tolerance: float, tmp_path: Path, saved: tuple[Path, dict[str, list[float]]]
) -> None:
    num_layers = 4 if "interleaved" in (source, name) else 2  # enough for four stages
    folder, losses = saved
    if source not in losses or num_layers > 2:
        folder = tmp_path
        of_ranks = run_ranks(save, layout_of(source).num_ranks, source, folder, num_layers)
        losses = {source: mean_losses(of_ranks)}
    of_sources = run_ranks(load, layout_of(name).num_ranks, name, [source], folder, num_layers)
    found = mean_losses([of_rank[source] for of_rank in of_sources])
    assert found == pytest.approx(losses[source], rel=tolerance)
