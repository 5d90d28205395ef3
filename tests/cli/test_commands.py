"""The commands' options: help with examples, and mistakes in plain words before anything starts."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from colossalai import __version__
from colossalai.cli import main
from tests.cli.command import start

pytestmark = pytest.mark.unit


def _invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.mark.parametrize(
    ("args", "example"),
    [
        ((), "colossalai run --nproc_per_node 4 train.py"),
        (("run",), "colossalai run --nproc_per_node 2 --master_port 29505 -m package.train"),
        (("check",), "colossalai check -i --json"),
    ],
)
def test_help_has_an_example(args: tuple[str, ...], example: str):
    result = _invoke(*args, "--help")
    assert result.exit_code == 0
    assert f"\n    {example}\n" in result.output


def test_version():
    assert _invoke("--version").output == f"colossalai, version {__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--nproc_per_node", "0", "job.py"), "--nproc_per_node 0 would start no process; use 1 or more"),
        (("--nproc-per-node", "2", "nosuch.py"), "there is no script 'nosuch.py' in /"),
        (("--nproc_per_node", "2", "-m", "nosuch.job"), "there is no module 'nosuch' in /"),
        (("\N{EN DASH}nproc_per_node", "4", "job.py"), "options start with two hyphens: --"),
        (("--nproc_per_nod", "4", "job.py"), "No such option '--nproc_per_nod'"),
        (("--master_port", "70000", "job.py"), "port=70000 is not a TCP port; use a number from 1 to 65535"),
        ((), "Missing argument 'SCRIPT'"),
    ],
)
def test_a_mistake_is_said_in_plain_words(
    args: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("raise AssertionError('started')")
    result = _invoke("run", *args)
    assert result.exit_code == 2
    assert message in result.output


def test_check_wants_to_know_what():
    result = _invoke("check")
    assert result.exit_code == 2
    assert "colossalai check -i" in result.output


def test_check_as_json(tmp_path: Path):
    command = start(tmp_path, "check", "-i", "--json")
    try:
        assert command.wait() == 0
    finally:
        command.end()
    report = json.loads(command.out)
    assert set(report) == {"versions", "devices", "backends", "libraries", "fits", "is_fit"}
    assert report["versions"]["colossalai"] == __version__
    assert report["backends"]["gloo"] is True
    assert report["is_fit"] is True
