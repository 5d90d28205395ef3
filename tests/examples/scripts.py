"""Run the scripts of examples/ on the ranks of the tests, and import their modules."""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_script(script: str, *args: str) -> None:
    """Run a script of examples/ as `python script args...` would; the function that ranks call."""
    path = EXAMPLES / script
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def example_module(file: str) -> ModuleType:
    """Import a module of examples/ under a name of its own: several have a data.py."""
    path = EXAMPLES / file
    name = f"example_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
