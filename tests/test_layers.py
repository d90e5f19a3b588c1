"""Packages only import from lower layers, and startup imports little."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import whet
from whet import run_directory

ROOT = Path(whet.__file__).parent

# a package may import from packages below it, in the order of docs/architecture.md
LAYERS = [
    {"cli"},
    {"api"},
    {"reporting"},
    {"studies"},
    {"runs"},
    {"planning"},
    {"recipes"},
    {"rl"},
    {"evaluation"},
    {"training"},
    {"objectives"},
    {"generation"},
    {"parallel"},
    {"model_io"},
    {"adapters"},
    {"given"},
    {"data"},
    {"models"},
    {"ops"},
    {"config"},
    {"run_directory"},
    {"storage", "hardware"},
    {"lazy_import", "user_code", "error_boundary"},
    {"errors"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Yield the packages of whet that a file imports outside of type-checking blocks."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("whet."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("whet."))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    package = package_of(path)
    if package in ("__init__", "__main__", "analysis", "callbacks", "merging", "optim"):  # lazy names
        return
    for imported in imports(path):
        assert imported in LEVEL, f"{path.name} imports an unknown package {imported}"
        assert imported == package or LEVEL[imported] > LEVEL[package], (
            f"{package} must not import {imported}"
        )


@pytest.mark.parametrize(
    ("package", "lower"), [("templates", {"templates", "sources"}), ("sources", {"sources", "synthetic"})]
)
def test_imports_within_data_point_down(package, lower):
    for path in (ROOT / "data" / package).glob("*.py"):
        modules = [
            node.module.split(".")[2]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("whet.data.")
        ]
        assert set(modules) & DATA_PACKAGES <= lower, f"{path.name} imports {modules}"


DATA_PACKAGES = {path.parent.name for path in (ROOT / "data").glob("*/__init__.py")}
RUN_FILES = {value for value in vars(run_directory).values() if isinstance(value, str) and "." in value}


def test_file_names_of_a_run_are_defined_in_one_module():
    names = {
        name for name in RUN_FILES if name.endswith((".json", ".jsonl", ".yaml", ".txt", ".html", ".png"))
    }
    assert {"metrics.jsonl", "config.yaml", "provenance.json", "samples.jsonl"} <= names
    names -= {"state.json"}  # also a file of saved datasets
    for path in ROOT.rglob("*.py"):
        if path.name == "run_directory.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{path.relative_to(ROOT)}: {node.value}"


def test_every_public_name_exists():
    for name in dir(whet):
        assert getattr(whet, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = whet.lod


def test_importing_whet_is_lightweight():
    heavy = "import sys, whet, whet.cli.app; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    completed = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


def test_help_imports_few_modules():
    """`whet --help` is fast because it imports few modules, and no large ones."""
    script = """
import sys
from whet.cli import app
sys.argv = ["whet", "--help"]
try:
    app.main()
except SystemExit:
    large = [name for name in ("torch", "transformers", "numpy", "pydantic", "rich") if name in sys.modules]
    print(len(sys.modules), large, file=sys.stderr)
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "train" in completed.stdout
    modules, large = completed.stderr.split(maxsplit=1)
    assert large.strip() == "[]"
    assert int(modules) < 400


def test_plain_run_imports_only_what_it_needs(tiny_directory, tmp_path):
    """LoRA fine-tuning does not import other objectives, optimizers, families, probes, or generation."""
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": str(tiny_directory),
        "data": {"train": "train.jsonl", "max_length": 64},
        "run": {"name": "plain", "steps": 1, "batch_size": 4, "device": "cpu"},
    }
    script = f"""
import sys
import whet
whet.train({config!r})
print(*(name for name, module in sys.modules.items()
        if name.startswith("whet.") and not hasattr(module, "__path__")))
"""
    command = [sys.executable, "-c", script]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = completed.stdout.split()
    unneeded = ("recipes.grpo", "recipes.classify", "recipes.quality", "recipes.mix", "objectives.preference")
    unneeded += (
        "rl.",
        "studies.",
        "planning.",
        "reporting.console",  # for the progress bar
        "reporting.run",
        "generation.",
        "models.families.qwen",
        "model_io.gguf",
    )
    assert [name for name in loaded if name.removeprefix("whet.").startswith(unneeded)] == []
    assert len(loaded) <= 160


@pytest.mark.parametrize("package", ["whet", *(f"whet.{name}" for name in whet._MODULES if name != "errors")])
def test_star_import_has_every_public_name(package):
    names = {}
    exec(f"from {package} import *", names)
    assert names.keys() - {"__builtins__"} == set(sys.modules[package]._MODULE_OF)
