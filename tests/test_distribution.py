"""The distribution has four packages with all their files and imports no module of the user by accident. It accepts the
versions of dependencies that are tested and those that engines pin."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

import dsa
from dsa_layers.command.main import main
from dsa_layers.hf import VERSION
from tests.gpu import receipt, run

ROOT = Path(__file__).parent.parent
PACKAGES = ("dsa", "dsa_layers", "dsa_bench", "dsa_engines")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Likely names of modules next to a user's script. This project once had such modules at the top level.
NAMES = (
    *("reference", "vendored", "benchmarks", "tests", "utils", "config", "layers", "models", "kernels", "ops", "cute"),
    *("testing", "backends", "generation", "checkpoint", "tokenizer", "sampling", "harness", "examples", "peers"),
)


def packages():
    return setuptools.find_packages(str(ROOT), **PROJECT["tool"]["setuptools"]["packages"]["find"])


def test_top_level_names():
    assert {name.partition(".")[0] for name in packages()} == {*PACKAGES}


def test_every_file_of_the_packages_is_installed():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    given = {path for package, globs in data.items() for glob in globs for path in (ROOT / package).glob(glob)}
    installed = set(packages())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            folder = ".".join(path.parent.relative_to(ROOT).parts)
            assert folder in installed or path in given, f"{folder} has no __init__.py"
            assert path.suffix == ".py" or path in given, f"{path} is not in package-data"


CODE = """
import dsa, torch
dsa.per_token_cast_to_fp8(torch.randn(2, 128))
dsa.rms_norm(torch.randn(2, 128), None)
import dsa_layers.generation.generator, dsa_layers.io.loading, dsa_layers.tiny
import dsa_layers.command.compare, dsa_bench.command
from dsa_bench.harness import case
for op in case.benchmarks():
    case.load(op)
import dsa_engines.sglang, dsa_engines.vllm
dsa_engines.sglang.register()
dsa_engines.vllm.register()
from dsa_layers.command.main import main
main(['check'])
"""


def test_a_users_modules_of_any_name_are_not_imported(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the user\\'s own {name}.py was imported')\n")
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return (paths in a wheel, paths in a source distribution). The checkout has a stale build/ folder, whose files
    must not be packed."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("out")
    for path in ROOT.glob("[!.]*"):
        if path.is_dir() and path.name in (*PACKAGES, "tests", "docs", "examples"):
            shutil.copytree(path, checkout / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, checkout)
    (checkout / "build" / "lib" / "reference").mkdir(parents=True)
    (checkout / "build" / "lib" / "reference" / "__init__.py").touch()
    for kind in ("wheel", "sdist"):
        code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(out)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, check=True)
    with zipfile.ZipFile(*out.glob("*.whl")) as wheel, tarfile.open(*out.glob("*.tar.gz")) as source:
        return set(wheel.namelist()), {name.partition("/")[2] for name in source.getnames()}


def files_of(*folders):
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_has_the_packages_and_nothing_else(built):
    wheel, _ = built
    assert {name for name in wheel if ".dist-info/" not in name} == files_of(*PACKAGES)


def test_the_source_distribution_has_what_its_tests_need(built):
    _, source = built
    assert files_of(*PACKAGES, "tests", "docs", "examples") <= source
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml"} <= source


def test_requirements_of_linux_are_marked():
    """dsa must be installable on macOS, but some required packages exist only for Linux."""
    for requirement in PROJECT["project"]["dependencies"]:
        name = requirement.partition(">")[0].partition("[")[0]
        assert name.startswith(("nvidia-", "apache-tvm", "cuda-")) == ("sys_platform == 'linux'" in requirement)


# Versions that vLLM 0.33.0 and SGLang 0.5.23 pin. dsa must accept them, so that one environment can have an engine and
# dsa.
ENGINES = {
    "nvidia-cutlass-dsl": ["4.8.0"],
    "apache-tvm-ffi": ["0.1.11"],
    "torch": ["2.14.0", "2.14.1"],
    "tokenizers": ["0.23.2"],
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_engines_pin_is_accepted(name):
    (required,) = (x for x in map(Requirement, PROJECT["project"]["dependencies"]) if x.name == name)
    assert all(required.specifier.contains(version) for version in ENGINES[name])


def test_the_oldest_dsl_is_the_one_that_is_tested():
    makefile = (ROOT / "Makefile").read_text()
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        (required,) = (x for x in map(Requirement, PROJECT["project"]["dependencies"]) if x.name == name)
        (oldest,) = (part.version for part in required.specifier if part.operator == ">=")
        assert re.search(rf"{name}(\[cu13\])?=={re.escape(oldest)}[\s\"]", makefile)
        assert re.search(rf"{name}(\[cu13\])?=={re.escape(oldest)}[\s\"]", run.__doc__)
        assert name != "nvidia-cutlass-dsl" or oldest == receipt.OLDEST_DSL


def test_the_makefile_names_paths_that_exist():
    paths = re.findall(r"\btests/[\w/.]+", (ROOT / "Makefile").read_text())
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_the_version_of_transformers_that_is_accepted_is_tested():
    extras = PROJECT["project"]["optional-dependencies"]
    (accepted,) = map(Requirement, extras["transformers"])
    assert [minor for minor in range(99) if accepted.specifier.contains(f"5.{minor}.0")] == [int(VERSION[2:])]
    assert f"transformers=={VERSION}.0" in extras["test"]


def test_one_version(capsys):
    assert PROJECT["project"]["version"] == dsa.__version__
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.startswith(f"## {dsa.__version__}")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert dsa.__version__ in capsys.readouterr().out


def test_the_readme_says_how_to_install():
    assert f"pip install {PROJECT['project']['name']}" in (ROOT / "README.md").read_text()
