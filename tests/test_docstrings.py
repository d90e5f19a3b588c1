"""Docstrings with an Args section name the arguments that the function has: the API reference is built from them."""

import ast
import re
from pathlib import Path

import pytest

import whet

SOURCE = Path(whet.__file__).parent


def documented_arguments(docstring):
    """Return the names in the Args section of a Google-style docstring."""
    match = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, flags=re.MULTILINE)
    return re.findall(r"^    (\*{0,2}\w+)(?: \([^)]*\))?:", match[1], flags=re.MULTILINE) if match else []


def arguments_of(node):
    """Return the arguments of a function, or of a class: its __init__, or its fields."""
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:  # a dataclass, or the __init__ of a base class
            return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)} or None
        node = inits[0]
    arguments = node.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    extra = {f"*{arguments.vararg.arg}"} if arguments.vararg else set()
    return names | extra | ({f"**{arguments.kwarg.arg}"} if arguments.kwarg else set())


@pytest.mark.parametrize("package", sorted({p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py")}))
def test_documented_arguments_exist(package):
    root = SOURCE / package
    for path in root.rglob("*.py") if root.is_dir() else [root]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = documented_arguments(ast.get_docstring(node) or "")
                arguments = arguments_of(node)
                unknown = set() if arguments is None else set(names) - arguments
                assert not unknown, f"{path}:{node.lineno}: {node.name} has no {unknown}"
