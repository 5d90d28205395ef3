"""Host lists, host files, and what is said about a mistake in one."""

from pathlib import Path

import pytest

from colossalai.cluster._hosts import (
    Host,
    allocated_hosts,
    expand_nodelist,
    parse_hosts,
    read_hostfile,
    select_hosts,
)

pytestmark = pytest.mark.unit


def file(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host1,host2", (Host("host1"), Host("host2"))),
        (" a , b:4 ,", (Host("a"), Host("b", 4))),
        ("me@a:2,10.0.0.1:3", (Host("me@a", 2), Host("10.0.0.1", 3))),
        ("fe80::1,::1", (Host("fe80::1"), Host("::1"))),
        ("n[1-2,5]:8,m", (Host("n1", 8), Host("n2", 8), Host("n5", 8), Host("m"))),
    ],
)
def test_a_list(text: str, expected: tuple[Host, ...]):
    assert parse_hosts(text) == expected
    assert parse_hosts(",".join(map(str, expected))) == expected


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[1-3,7]", "node1 node2 node3 node7"),
        ("gpu[008-010],login", "gpu008 gpu009 gpu010 login"),
        ("r[1-2]n[1,3]-ib", "r1n1-ib r1n3-ib r2n1-ib r2n3-ib"),
        ("host2", "host2"),
    ],
)
def test_a_bracket_expression(text: str, names: str):
    assert expand_nodelist(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "names no host"),
        ("a,b,a", "'a' is named 2 times; to start several processes: a:2"),
        ("a:0", "slots='0'"),
        ("a:x", "slots='x'"),
        ("-oProxyCommand=rm", "is not the name of a host"),
        ("node[1-3", "is not the name of a host"),
        ("node[3-1]", "the range '3-1'"),
        ("node[1-999999999]", "over 100000 hosts"),
        ("node[a]", "'a' in 'node[a]' is neither a number nor a range"),
    ],
)
def test_a_mistake_in_a_list(text: str, error: str):
    with pytest.raises(ValueError, match=f"--host {text!r}".replace("[", r"\[")) as caught:
        parse_hosts(text)
    assert error in str(caught.value)


def test_a_file_in_all_forms(tmp_path: Path):
    text = "# ours\nhost1 slots=4  # the big one\n\nhost2:2\nhost3\r\n  n[1-2] slots=1\n"
    assert read_hostfile(file(tmp_path, text)) == (
        Host("host1", 4),
        Host("host2", 2),
        Host("host3"),
        Host("n1", 1),
        Host("n2", 1),
    )


def test_a_file_of_pbs_has_a_line_for_each_slot(tmp_path: Path):
    assert read_hostfile(file(tmp_path, "a\na\nb\n")) == (Host("a", 2), Host("b", 1))
    assert read_hostfile(file(tmp_path, "a\nb\n")) == (Host("a"), Host("b"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a\nb slot=4\n", "line 2: 'slot=4' is not understood"),
        ("a\nb slots=0\n", "line 2: slots='0'"),
        ("a:2\n\na slots=2\n", "line 3: the host 'a' is named 2 times"),
        ("a:2 slots=2\n", "line 1: the number of slots is given twice"),
        ("a\na\nb:3\n", "names 'a' in several lines and has numbers of slots as well"),
        ("# nobody\n", "names no host"),
    ],
)
def test_a_mistake_in_a_file_is_shown_with_its_line(tmp_path: Path, text: str, error: str):
    path = file(tmp_path, text)
    with pytest.raises(ValueError, match="hosts") as caught:
        read_hostfile(path)
    assert str(caught.value).startswith(str(path))
    assert error in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read the host file .*nowhere"):
        read_hostfile(tmp_path / "nowhere")


def test_include_and_exclude():
    hosts = (Host("a"), Host("b", 2), Host("c"))
    assert select_hosts(hosts) == hosts
    assert select_hosts(hosts, include=("c", "b")) == hosts[1:]
    assert select_hosts(hosts, exclude=("b",)) == (hosts[0], hosts[2])
    with pytest.raises(ValueError, match="--include names 'd', which is not among the hosts a, b, c"):
        select_hosts(hosts, include=("d",))
    with pytest.raises(ValueError, match="leaves no host"):
        select_hosts(hosts, exclude=("a", "b", "c"))
    with pytest.raises(ValueError, match="use one of them"):
        select_hosts(hosts, include=("a",), exclude=("b",))


def test_the_allocation_of_a_batch_system(tmp_path: Path):
    assert allocated_hosts({}) == ()
    assert allocated_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}) == (Host("n1"), Host("n2"))
    assert allocated_hosts({"SLURM_NODELIST": "n1"}) == (Host("n1"),)
    assert allocated_hosts({"PBS_NODEFILE": str(file(tmp_path, "a\na\n"))}) == (Host("a", 2),)
    with pytest.raises(ValueError, match=r"\$SLURM_JOB_NODELIST"):
        allocated_hosts({"SLURM_JOB_NODELIST": "n["})
