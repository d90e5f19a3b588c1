"""The distribution: metadata, packaged files, and a wheel that works outside of the checkout."""

import email
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_metadata_is_complete():
    project = PROJECT["project"]
    assert project["license"] == "Apache-2.0"
    assert not any(
        name.startswith("License ::") for name in project["classifiers"]
    )  # setuptools refuses both
    assert "Typing :: Typed" in project["classifiers"]
    assert any(name.startswith("Topic ::") for name in project["classifiers"])
    versions = [name.rpartition(" ")[2] for name in project["classifiers"] if ":: 3." in name]
    assert versions == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={versions[0]}"
    for name in [project["readme"], *project["license-files"]]:
        assert (ROOT / name).is_file()


def test_version_matches_the_package():
    import whet

    assert PROJECT["project"]["version"] == whet.__version__


def test_every_directory_of_the_source_is_a_package():
    assert PROJECT["tool"]["setuptools"]["packages"]["find"] == {"where": ["src"]}  # nothing is left out
    directories = {path.parent for path in (SOURCE / "whet").rglob("*.py")}
    # without __init__.py, tools that do not know namespace packages miss the directory
    assert [str(path) for path in directories if not (path / "__init__.py").is_file()] == []


def test_every_other_file_of_the_source_is_package_data():
    files = (
        path for path in (SOURCE / "whet").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    others = [str(path.relative_to(SOURCE / "whet")) for path in files if path.suffix != ".py"]
    assert others == PROJECT["tool"]["setuptools"]["package-data"]["whet"] == ["py.typed"]


def test_install_page_lists_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"`{extra}`" in page, f"docs/install.md does not mention the extra {extra}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the tracked files that it needs."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel offline needs pip and setuptools in this environment")
    directory = tmp_path_factory.mktemp("wheel")
    copy = directory / "source"  # setuptools writes build/ and egg-info beside the source
    shutil.copytree(SOURCE, copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", directory, copy)
    (path,) = directory.glob("*.whl")
    return path


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_wheel_holds_every_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    expected = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("whet/**/*.py")} | {"whet/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields.get_all("Classifier") == PROJECT["project"]["classifiers"]
    assert set(fields.get_all("Provides-Extra")) == set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.slow
def test_wheel_works_outside_of_the_checkout(wheel, tiny_directory, tmp_path):
    target, project = tmp_path / "site", tmp_path / "project"
    project.mkdir()
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    environment = {
        **os.environ,
        "PYTHONPATH": str(target),
        "WHET_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }

    def run(*command):
        result = subprocess.run(
            list(map(str, command)), cwd=project, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def whet(*arguments):
        return run(sys.executable, target / "bin" / "whet", *arguments)

    module = run(sys.executable, "-c", "import whet; print(whet.__file__)").strip()
    assert Path(module).is_relative_to(target)
    assert whet("--version") == f"whet {PROJECT['project']['version']}\n"
    whet("init", "sft")
    overrides = (f"model={tiny_directory}", "run.steps=1", "run.device=cpu", "data.max_length=257")
    whet("train", "sft.yaml", *overrides)
    assert (project / "runs" / "sft" / "final").is_dir()
    whet("generate", "runs/sft", "Hello", "--max-tokens", "4")
