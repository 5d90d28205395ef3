"""CPU binding: how cores are dealt out, what is read of a machine, and when ranks are left unbound."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.cluster._binding import Binding, Core, bind_ranks, deal_out, read_cores

pytestmark = pytest.mark.unit


@st.composite
def machines(draw: st.DrawFn) -> list[Core]:
    """Cores of some packages, with some nodes each, of one to three CPUs each, numbered in some order."""
    places = [
        (package, 10 * package + node)
        for package in range(draw(st.integers(1, 3)))
        for node in range(draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    num_siblings = [draw(st.integers(1, 3)) for _ in places]
    cpus = iter(draw(st.permutations(range(sum(num_siblings)))))
    return [
        Core(package, node, tuple(sorted(itertools.islice(cpus, count))))
        for (package, node), count in zip(places, num_siblings, strict=True)
    ]


def _crossings(shares: list[list[Core]]) -> tuple[int, int]:
    """Count the packages, and the nodes, beyond the first of each share."""
    return (
        sum(len({core.package for core in share}) - 1 for share in shares),
        sum(len({(core.package, core.node) for core in share}) - 1 for share in shares),
    )


@settings(max_examples=60)
@given(machines(), st.data())
def test_every_core_is_dealt_out_once_and_evenly(cores: list[Core], data: st.DataObject):
    num_ranks = data.draw(st.integers(1, len(cores)))
    shares = deal_out(cores, num_ranks)
    assert len(shares) == num_ranks
    assert [core for share in shares for core in share] == sorted(cores)  # once, whole, neighbours together
    sizes = [len(share) for share in shares]
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


@settings(max_examples=40)
@given(machines(), st.data())
def test_packages_and_nodes_are_kept_together_where_it_can_be(cores: list[Core], data: st.DataObject):
    num_ranks = data.draw(st.integers(1, min(len(cores), 7)))
    size, num_larger = divmod(len(cores), num_ranks)
    in_order, found = sorted(cores), []
    for larger in itertools.combinations(range(num_ranks), num_larger):
        rest = iter(in_order)
        found.append([[*itertools.islice(rest, size + (rank in larger))] for rank in range(num_ranks)])
    assert _crossings(deal_out(cores, num_ranks)) == min(map(_crossings, found))


def test_no_rank_has_cores_of_two_packages_without_need():
    cores = [Core(package, package, (3 * package + number,)) for package in range(2) for number in range(3)]
    shares = deal_out(cores, 4)
    assert [[core.cpus for core in share] for share in shares] == [
        [(0,), (1,)],
        [(2,)],
        [(3,), (4,)],
        [(5,)],
    ]


def _write_machine(folder: Path, *, num_packages: int, cores_each: int, num_siblings: int) -> Path:
    """Write what the kernel says about a machine: siblings are as far apart as there are cores."""
    num_cores = num_packages * cores_each
    for cpu in range(num_cores * num_siblings):
        core = cpu % num_cores
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / f"node{core // cores_each}").mkdir()
        siblings = ",".join(str(core + number * num_cores) for number in range(num_siblings))
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
        (folder / f"cpu{cpu}" / "topology" / "physical_package_id").write_text(f"{core // cores_each}\n")
    (folder / "online").write_text(f"0-{num_cores * num_siblings - 1}\n")
    return folder


def _bind(folder: Path, num_ranks: int, is_asked: bool | None = None, **environment: str) -> Binding:
    """Bind the ranks of a machine that an agent has for itself."""
    allowed = {int(path.name[3:]) for path in folder.glob("cpu*")}
    return bind_ranks(num_ranks, is_asked=is_asked, environment=environment, allowed=allowed, system=folder)


def test_siblings_stay_together(tmp_path: Path):
    _write_machine(tmp_path, num_packages=2, cores_each=3, num_siblings=2)
    assert read_cores(range(12), tmp_path) == [
        Core(core // 3, core // 3, (core, core + 6)) for core in range(6)
    ]
    binding = _bind(tmp_path, 2)
    assert binding.cpus == ((0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11))
    assert binding.as_word == "0,1,2,6,7,8;3,4,5,9,10,11"
    assert binding.num_threads == 3  # not of siblings, which share what a thread of products keeps busy
    assert binding.note == (
        "each rank has cores of its own (CPUs 0-2,6-8; 3-5,9-11) and computes with 3 threads; "
        "--no-bind leaves it to the kernel"
    )
    assert "computes with 4 threads" in _bind(tmp_path, 2, OMP_NUM_THREADS="4").note
    binding = _bind(tmp_path, 4)
    assert binding.cpus == ((0, 1, 6, 7), (2, 8), (3, 4, 9, 10), (5, 11))
    assert binding.num_threads == 1  # alike on all ranks


def test_many_ranks_have_a_short_line(tmp_path: Path):
    _write_machine(tmp_path, num_packages=1, cores_each=10, num_siblings=1)
    assert "(CPUs 0; 1; 2; 3; 4; 5; 6; 7; ...)" in _bind(tmp_path, 10, is_asked=True).note


def test_a_kernel_that_says_nothing(tmp_path: Path):
    assert read_cores([3, 1], tmp_path) == [Core(0, 0, (1,)), Core(0, 0, (3,))]
    (tmp_path / "cpu1" / "topology").mkdir(parents=True)
    (tmp_path / "cpu1" / "topology" / "physical_package_id").write_text("-1\n")  # as some processors have it
    (tmp_path / "cpu1" / "topology" / "thread_siblings_list").write_text("")
    assert read_cores([3, 1], tmp_path) == [Core(0, 0, (1,)), Core(0, 0, (3,))]


@pytest.mark.parametrize(
    ("num_ranks", "environment", "reason"),
    [
        (2, {"OMP_PROC_BIND": "close"}, "OMP_PROC_BIND is set, and places their threads"),
        (2, {"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY is set, and places their threads"),
        (2, {"KMP_AFFINITY": "compact"}, "KMP_AFFINITY is set, and places their threads"),
        (
            2,
            {"SLURM_CPU_BIND": "quiet,mask_cpu:0x3"},
            "SLURM has bound them (SLURM_CPU_BIND=quiet,mask_cpu:0x3)",
        ),
        (5, {}, "there are 5 for 4 cores"),
    ],
)
def test_ranks_that_are_left_alone(tmp_path: Path, num_ranks: int, environment: dict[str, str], reason: str):
    _write_machine(tmp_path, num_packages=1, cores_each=4, num_siblings=2)
    binding = _bind(tmp_path, num_ranks, **environment)
    assert (binding.cpus, binding.as_word, binding.note) == ((), "-", "")
    assert binding.num_threads == 8 // num_ranks
    assert _bind(tmp_path, num_ranks, is_asked=False, **environment) == binding
    asked = _bind(tmp_path, num_ranks, is_asked=True, **environment)
    assert (asked.cpus, asked.num_threads) == ((), 8 // num_ranks)
    assert asked.note == f"--bind: the ranks are not bound to cores: {reason}"


def test_a_command_that_is_bound_already(tmp_path: Path):
    _write_machine(tmp_path, num_packages=2, cores_each=2, num_siblings=1)

    def bind(is_asked: bool | None) -> Binding:
        return bind_ranks(2, is_asked=is_asked, environment={}, allowed={1, 2}, system=tmp_path)

    assert bind(None) == Binding(num_ranks=2, num_threads=1)
    assert bind(True).note == (
        "--bind: the ranks are not bound to cores: this command itself is bound, to 2 of 4 CPUs"
    )


def test_who_is_bound_unasked(tmp_path: Path):
    _write_machine(tmp_path, num_packages=2, cores_each=2, num_siblings=1)
    assert _bind(tmp_path, 1).cpus == ()  # it has the machine for itself
    assert _bind(tmp_path, 1, is_asked=True).cpus == ((0, 1, 2, 3),)
    assert _bind(tmp_path, 2).cpus == ((0, 1), (2, 3))
    assert _bind(tmp_path, 2, is_asked=False).cpus == ()
    assert _bind(tmp_path, 2, SLURM_CPU_BIND="quiet,none").cpus == ((0, 1), (2, 3))


def test_the_kernel_places_the_ranks_of_a_flat_machine(tmp_path: Path):
    _write_machine(tmp_path, num_packages=1, cores_each=4, num_siblings=1)
    assert _bind(tmp_path, 2) == Binding(num_ranks=2, num_threads=2)
    assert _bind(tmp_path, 2, is_asked=True).cpus == ((0, 1), (2, 3))
