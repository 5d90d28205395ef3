"""The doctor: broken things are lines of the report, never errors."""

import ast
import dataclasses
import json
import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.cluster import _doctor, _speed, examine_installation
from colossalai.cluster._speed import advise, measure_speed

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def _install(folder: Path, name: str, source: str) -> tuple[str, str, str]:
    """Make an importable distribution."""
    (folder / f"{name}.py").write_text(source)
    (folder / f"{name}-1.2.dist-info").mkdir()
    (folder / f"{name}-1.2.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n"
    )
    return name, name, "tests"


def test_libraries_that_crash_hang_or_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    libraries = _doctor.examine_libraries(
        (
            _install(tmp_path, "good_one", ""),
            _install(
                tmp_path, "raising_one", "raise RuntimeError('operator torchvision::nms does not exist')"
            ),
            _install(tmp_path, "crashing_one", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
            ("missing_one", "missing_one", "tests"),
        )
    )
    # Alone, by a limit that the others need not keep on a busy machine.
    hanging = _install(tmp_path, "hanging_one", "import time; time.sleep(120)")
    libraries += _doctor.examine_libraries((hanging,), timeout_s=1.0)
    assert [(each.name, each.version, each.import_error) for each in libraries] == [
        ("good_one", "1.2", None),
        ("raising_one", "1.2", "RuntimeError: operator torchvision::nms does not exist"),
        ("crashing_one", "1.2", "the import ends with exit code -11"),
        ("missing_one", None, None),
        ("hanging_one", "1.2", "the import does not end within 1 s"),
    ]
    assert [each.is_broken for each in libraries] == [False, True, True, False, True]
    actions = [each.action for each in libraries]
    assert actions[:2] == ["", "pip install --force-reinstall raising_one"]
    assert actions[3] == ""


def test_the_report_is_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_doctor, "_LIBRARIES", ())
    report = examine_installation()
    assert report.is_fit
    assert report.versions["torch"] == torch.__version__
    assert report.versions["colossalai"] == colossalai.__version__
    assert report.devices[0].kind == "cpu"
    assert report.devices[0].memory_gib > 0
    assert report.backends["gloo"] == dist.is_gloo_available()
    assert json.loads(json.dumps(dataclasses.asdict(report)))["fits"][0]["is_fit"] is True


def test_speed_is_measured_for_each_way_to_multiply():
    shapes, threads = [], torch.get_num_threads()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((a.dtype, torch.get_num_threads()))
        return a @ b

    speed = measure_speed({"mine": multiply})
    names = [each.name for each in speed.products if each.name != "float32 products, oneDNN"]
    assert names == ["float32 products, torch", "float32 products, mine", "bfloat16 products, torch"]
    assert ("float32 products, oneDNN" in [each.name for each in speed.products]) == (
        torch.backends.mkldnn.is_available()
    )
    assert all(each.value > 0 for each in (*speed.products, speed.memory))
    assert len(shapes) >= 3  # one to warm up
    assert {*shapes} == {(torch.float32, 1)}
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_onednn_multiplies_what_torch_multiplies():
    torch.manual_seed(0)
    a, b = torch.randn(8, 5), torch.randn(5, 7)
    torch.testing.assert_close(_speed._multiply_by_onednn(a, b), a @ b)


@pytest.mark.parametrize(
    ("float32", "bfloat16", "said"),
    [
        (100.0, 400.0, "good at bfloat16: its products are 4.0 times as fast as float32's"),
        (100.0, 110.0, "float32: bfloat16 products are about as fast, so it saves memory only"),
        (100.0, 80.0, "float32: bfloat16 products are about as fast, so it saves memory only"),
        (100.0, 20.0, "float32: bfloat16 products take 5.0 times as long"),
    ],
)
def test_the_advice_follows_from_the_figures(float32: float, bfloat16: float, said: str):
    assert advise(float32, bfloat16) == said


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_doctor, "_LIBRARIES", ())
    monkeypatch.setattr(_doctor, "_TORCH_ABILITIES", ("nn.Linear", "nn.Hyperdrive", "warp.drive"))
    monkeypatch.setattr(_doctor, "_MIN_PYTHON", (4, 0))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    report = examine_installation()
    assert not report.is_fit
    backend = "gloo" if report.devices[-1].kind == "cpu" else "nccl"
    assert [fit.action for fit in report.fits] == [
        "install Python 4.0 or newer",
        "install torch 2.11 or newer",
        f"install a build of torch with {backend}, as those from pytorch.org",
    ]
    assert [fit.detail for fit in report.fits] == [
        f"Python {platform.python_version()}",
        "not found: torch.nn.Hyperdrive, torch.warp.drive",
        f"this build of torch has no {backend}, which {report.devices[-1].kind} needs",
    ]


def _imports_of_the_package() -> set[str]:
    """Return the top-level modules that the package imports: not of Python, not its own, not required."""
    found: set[str] = set()
    for file in (ROOT / "colossalai").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"colossalai"}


def test_the_optional_libraries_are_complete():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"\W", line.replace("-", "_"))[0] for line in project["dependencies"]}
    extras = {
        re.match(r"[\w.-]+", line)[0] for lines in project["optional-dependencies"].values() for line in lines
    }
    names = [name for name, *_ in _doctor._LIBRARIES]
    assert len(set(names)) == len(names)
    assert extras - set(names) == set()
    modules = {module.partition(".")[0] for _, module, _ in _doctor._LIBRARIES}
    of_these = {"starlette", "pydantic_core", "huggingface_hub"}  # fastapi, pydantic, transformers bring them
    assert _imports_of_the_package() - required - modules - of_these == set()
