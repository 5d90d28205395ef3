"""The commands' options: help with examples, and mistakes in plain words before anything starts."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from colossalai import __version__
from colossalai.cli import main
from colossalai.cluster import _doctor

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
        (("--nproc_per_node", "2", "."), "'.' is a folder without a __main__.py; name the script in it"),
        (("--host", "a,b", "."), "'.' is a folder without a __main__.py; name the script in it"),
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


def test_serving_without_its_libraries_names_them() -> None:
    # A process of its own: here the libraries may be imported already.
    code = (
        "import sys; sys.modules['fastapi'] = None; from colossalai.cli import main; main(['serve', 'gpt'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "serving needs the library fastapi, which is not installed: pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_wants_to_know_what():
    result = _invoke("check")
    assert result.exit_code == 2
    assert "colossalai check -i" in result.output


LIBRARIES = (("safetensors", "safetensors", "checkpoints"), ("nosuch", "nosuch", "nothing"))


@pytest.fixture(autouse=True, scope="module")
def measured_once() -> Iterator[None]:
    """Have the speed of the processor measured once: it takes half a second."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[Any] = []
        measure_speed = _doctor.measure_speed

        def measured(*args: Any) -> Any:
            found.extend([] if found else [measure_speed(*args)])
            return found[0]

        patch.setattr(_doctor, "measure_speed", measured)
        yield


def test_check_as_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_doctor, "_LIBRARIES", LIBRARIES)
    result = _invoke("check", "-i", "--json")
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert set(report) == {"versions", "devices", "backends", "speed", "libraries", "fits", "is_fit"}
    assert report["versions"]["colossalai"] == __version__
    assert report["backends"]["gloo"] is True
    figures = [*report["speed"]["products"], report["speed"]["memory"]]
    assert all(figure["value"] > 0 for figure in figures)
    assert [figure["unit"] for figure in figures] == ["GFLOP/s"] * (len(figures) - 1) + ["GB/s"]
    assert report["is_fit"] is True


def test_check_as_tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(_doctor, "_LIBRARIES", LIBRARIES)
    monkeypatch.setattr(_doctor, "_import_error", lambda *_: "RuntimeError: [nms] does not exist")
    result = _invoke("check", "-i")
    assert result.exit_code == 0
    assert re.search(rf"colossalai +{re.escape(__version__)}", result.output)
    assert "installed, does not import: RuntimeError: [nms] does not exist" in result.output
    assert re.search(r"nosuch +not installed +nothing", result.output)
    assert "Speed of one core" in result.output
    assert re.search(r"float32 products, torch +[\d.]+ GFLOP/s *\n", result.output)
    assert re.search(r"bfloat16 products, torch +[\d.]+ GFLOP/s *\n", result.output)
    assert re.search(r"memory, copied .* +[\d.]+ GB/s *\n", result.output)
    assert re.search(r"(good at bfloat16|float32): (its|bfloat16) products ", result.output)
    assert "The installation is fit." in result.output


def test_an_unfit_installation_ends_with_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(_doctor, "_LIBRARIES", ())
    monkeypatch.setattr(_doctor, "_TORCH_ABILITIES", ("warp.drive",))
    result = _invoke("check", "-i")
    assert result.exit_code == 1
    assert "The installation is NOT fit" in result.output
    assert re.search(r"found +what to do", result.output)
    assert re.search(r"NO +not found: torch.warp.drive +install torch 2.11 or newer", result.output)
