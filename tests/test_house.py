"""The house rules: packaging, guards, the direction of imports, sizes and docstrings of files."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vdnn.networks import NETWORKS
from vdnn.runtime.config import load_config, packaged_configs

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIR: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
LISTED: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]

BASE = {"", "errors", "units"}
MAY_IMPORT = {
    "": set(),
    "__main__": {"cli"},
    "errors": set(),
    "units": set(),
    "configs": set(),
    "layers": BASE | {"layers"},
    "memory": BASE | {"layers", "memory"},
    "networks": BASE | {"layers", "networks"},
    "runtime": BASE | {"layers", "memory", "networks", "configs", "runtime"},
    "bench": BASE | {"layers", "memory", "networks", "configs", "runtime", "bench"},
    "cli": BASE | {"layers", "memory", "networks", "configs", "runtime", "bench", "cli"},
}
"""What the modules of each part may import of vdnn; "" is the root package itself."""

PURE = {"", "errors", "units", "configs", "layers", "memory", "networks"}
"""Parts that import the standard library only."""

HOMES = {
    "numpy": re.compile(r"vdnn\.(runtime|bench)\b"),
    "matplotlib": re.compile(r"vdnn\.runtime\.(plots|algo_plots|paper_plots)$"),
    "cupy": re.compile(r"vdnn\.runtime\.backends\.cuda\b"),
    "torch": re.compile(r"vdnn\.bench\b"),
    "pickle": None,
    "cPickle": None,
    "dill": None,
    "cloudpickle": None,
    "joblib": None,
    "marshal": None,
    "shelve": None,
}
"""Where alone a library may be imported; None for nowhere."""

DISTRIBUTIONS = {"yaml": "pyyaml", "pydantic_core": "pydantic", "pynvml": "nvidia-ml-py"}
"""Import names that are not those of the distribution."""

PEERS = {"torch"}
"""Libraries that studies compare vdnn with, if they are there; never dependencies."""


def folder_of(package: str) -> Path:
    """The folder of a listed package."""
    known = max((name for name in PACKAGE_DIR if f"{package}.".startswith(f"{name}.")), key=len)
    return ROOT / PACKAGE_DIR[known] / Path(*package[len(known) :].strip(".").split("."))


def sources() -> Iterator[tuple[str, Path]]:
    """Module name and file of every module of every package on disk."""
    for package, folder in packages_on_disk().items():
        for file in sorted(folder.glob("*.py")):
            yield (package if file.stem == "__init__" else f"{package}.{file.stem}"), file


def packages_on_disk() -> dict[str, Path]:
    """Every folder with Python files under the top-level packages, by the name it should be imported as."""
    found: dict[str, Path] = {}
    for name, place in PACKAGE_DIR.items():
        top = ROOT / place
        for folder in (top, *sorted(path for path in top.rglob("*") if path.is_dir())):
            inner = folder.relative_to(top).parts
            if any(folder.glob("*.py")) and "__pycache__" not in inner:
                found.setdefault(".".join((name, *inner)), folder)
    # src/cli is found under "vdnn" and under its own name, which are the same
    return dict(sorted(found.items()))


def part_of(module: str) -> str:
    """ "vdnn.layers.conv" → "layers"; the root package and its own modules go by their names."""
    return f"{module}.".split(".")[1]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere in a module, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # what comes from "vdnn" itself may be one of its packages
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "vdnn" else [base]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            constant = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(constant, ast.Constant):
                yield node.lineno, str(constant.value)


def violations(module: str, text: str) -> list[str]:
    """What a module imports against the rules, one sentence each."""
    found = []
    part = part_of(module)
    for line, name in imported(ast.parse(text)):
        top = name.split(".")[0]
        home = HOMES.get(top, re.compile(""))
        if not top:
            found.append(f"{module}:{line}: relative import of {name}")
        elif top == "vdnn":
            target = part_of(name) if part_of(name) in MAY_IMPORT else ""
            if target not in MAY_IMPORT[part]:
                found.append(f"{module}:{line}: {part or 'vdnn'} must not import {name}")
        elif part in PURE and top not in sys.stdlib_module_names:
            found.append(f"{module}:{line}: {part or 'vdnn'} must import the standard library only, not {name}")
        elif home is None or not home.match(module):
            found.append(f"{module}:{line}: {name} must not be imported here")
    return found


# ---- imports


def test_imports_go_one_way_and_libraries_stay_where_they_belong():
    found = [sentence for module, file in sources() for sentence in violations(module, file.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("vdnn.errors", "from vdnn.units import MIB"),
        ("vdnn.layers.conv", "from vdnn.memory.plan import Plan"),
        ("vdnn.layers.conv", "import numpy as np"),
        ("vdnn.memory.plan", "def f():\n    import numpy"),
        ("vdnn.memory.plan", "from vdnn.networks import build"),
        ("vdnn.memory.plan", "from vdnn import networks"),
        ("vdnn.memory.plan", "import importlib\nimportlib.import_module('numpy')"),
        ("vdnn.networks.vgg", "from vdnn.memory import plan"),
        ("vdnn.runtime.trainer", "from vdnn.cli.train import main"),
        ("vdnn.runtime.trainer", "from vdnn.bench import tables"),
        ("vdnn.runtime.trainer", "from matplotlib.figure import Figure"),
        ("vdnn.runtime.trainer", "import cupy"),
        ("vdnn.runtime.checkpoint", "import pickle"),
        ("vdnn.bench.tables", "import vdnn.cli"),
        ("vdnn.cli.doctor", "import numpy as np"),
        ("vdnn.cli.doctor", "from . import plan"),
    ],
)
def test_the_check_of_imports_finds(module, text):
    assert len(violations(module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("vdnn.layers.conv", "import math\nfrom vdnn.errors import ShapeError"),
        ("vdnn.runtime.plots", "from matplotlib.figure import Figure\nimport numpy"),
        ("vdnn.runtime.backends.cuda.backend", "import cupy.cuda"),
        ("vdnn.cli.train", "from vdnn import __version__\nfrom vdnn.memory.plan import Plan"),
    ],
)
def test_the_check_of_imports_allows(module, text):
    assert violations(module, text) == []


def test_every_library_that_is_imported_is_declared():
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    declared = {re.split(r"[^A-Za-z0-9_.-]", text)[0].lower() for text in wanted}
    declared |= {re.sub(r"-cuda1\dx$|-cu1\d$", "", name) for name in declared}  # cupy-cuda12x is imported as cupy
    tops = {name.split(".")[0] for _, file in sources() for _, name in imported(ast.parse(file.read_text("utf-8")))}
    outside = {DISTRIBUTIONS.get(top, top) for top in tops if top not in sys.stdlib_module_names} - {"vdnn", *PEERS}
    unknown = {top for top in outside if top.replace("_", "-") not in declared}
    assert not unknown
    assert {"numpy", "pyyaml", "pydantic"} <= outside


# ---- files


def python_files() -> list[Path]:
    return [file for _, file in sources()] + sorted((ROOT / "tests").rglob("*.py"))


def test_every_module_has_a_docstring():
    without = [file for file in python_files() if not ast.get_docstring(ast.parse(file.read_text("utf-8")))]
    assert not without


def test_no_file_is_longer_than_400_lines():
    kernels = [path for folder in packages_on_disk().values() for path in (*folder.glob("*.cu"), *folder.glob("*.cuh"))]
    lengths = {str(f.relative_to(ROOT)): f.read_text("utf-8").count("\n") for f in (*python_files(), *kernels)}
    assert not {name: lines for name, lines in lengths.items() if lines > 400}


def test_every_network_has_a_packaged_config_of_its_name_and_the_other_way_round():
    assert set(packaged_configs()) == set(NETWORKS)
    assert {name: load_config(name).network.name for name in packaged_configs()} == {name: name for name in NETWORKS}


def test_ruff_finds_nothing():
    pytest.importorskip("ruff")
    run = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


# ---- packages


def test_the_packages_listed_are_the_packages_on_disk():
    assert sorted(LISTED) == sorted(packages_on_disk())
    assert {name: folder_of(name) for name in LISTED} == packages_on_disk()


def test_a_package_imported_from_its_folder_says_what_to_do():
    script = """
import importlib, json, sys
found = {}
for package, parent, name in json.load(sys.stdin):
    sys.path.insert(0, parent)
    try:
        importlib.import_module(name)
        found[package] = "imported"
    except ImportError as error:
        found[package] = str(error)
    sys.path.remove(parent)
    for key in [key for key in sys.modules if key.split(".")[0] == name]:
        del sys.modules[key]
print(json.dumps(found))
"""
    asked = [(name, str(folder.parent), folder.name) for name, folder in packages_on_disk().items()]
    run = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    for package, text in json.loads(run.stdout).items():
        assert f"the package {package}:" in text, package
        assert "pip install" in text


def packaged_files() -> set[str]:
    """Every file that a wheel must hold, by its name there."""
    found = set()
    for package, folder in packages_on_disk().items():
        inner = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        found |= {f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}" for path in inner}
    return found - {"vdnn/bench/README.md"}  # for those who read the sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, without the network."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools 77 or newer")
    pytest.importorskip("pip", reason="building a wheel needs pip")
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for folder in packages_on_disk().values():
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                target = copy / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), "."]
    pip(build, copy)
    return next(out.glob("*.whl"))


def pip(arguments, cwd):
    run = subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel installed, and an environment in which it is found first."""
    target = tmp_path_factory.mktemp("installed")
    pip(["install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)], target)
    return target, {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_wheel_holds_every_module_and_all_package_data(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packaged_files() - held == set()
    assert held - packaged_files() == set()
    assert {"vdnn/py.typed", "vdnn/configs/lenet.yaml", "vdnn/runtime/profiles/h200.yaml"} <= held
    assert "vdnn/runtime/data/mnist5k/ATTRIBUTION.md" in held


def test_the_wheel_states_licence_and_version(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in text
    assert f"Version: {PYPROJECT['project']['version']}\n" in text


def test_the_console_scripts_of_the_wheel_run_outside_the_tree(installed, tmp_path):
    target, env = installed

    def script(name, *arguments):
        command = [target / "bin" / name, *arguments]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    where = [sys.executable, "-c", "import vdnn; print(vdnn.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).parent == target / "vdnn"
    assert script("vdnn", "--version") == f"vdnn {PYPROJECT['project']['version']}\n"
    assert json.loads(script("vdnn", "plan", "googlenet", "--profile", "h200", "--json"))["network"] == "googlenet"
    said = script("vdnn-train", "lenet", "--iterations", "2")
    assert "done: 2 steps" in said
    assert "MNIST digits" in said
    assert (tmp_path / "runs" / "lenet" / "checkpoints").is_dir()


def test_the_version_is_stated_once():
    text = (ROOT / "src" / "__init__.py").read_text("utf-8")
    assert f'__version__ = "{PYPROJECT["project"]["version"]}"' in text
    assert importlib.metadata.version("vdnn") == PYPROJECT["project"]["version"]


def test_the_installed_package_passes_mypy(installed, tmp_path):
    pytest.importorskip("mypy")
    target, env = installed
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "vdnn"]
    run = subprocess.run(command, cwd=tmp_path, env={**env, "MYPYPATH": str(target)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
