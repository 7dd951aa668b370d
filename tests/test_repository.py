"""Promises about the repository itself."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = [
    *ROOT.glob("*.py"),
    *(p for folder in ("FLAlgorithms", "utils", "data") for p in (ROOT / folder).rglob("*.py")),
]
PACKAGES = {"yaml": "pyyaml"}  # import name -> package, where they differ


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name.split(".")[0] for name in found}


def test_every_import_is_in_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    required = {re.split(r"[<>=!~]", line)[0].lower() for line in lines}
    ours = {"FLAlgorithms", "utils", "data", "main", "main_plot"}
    used = set().union(*map(imports, PRODUCT)) - ours - set(sys.stdlib_module_names)
    assert {PACKAGES.get(name, name) for name in used} <= required
    assert {"torch", "numpy", "h5py"} <= used
    assert not any("==" in line for line in lines), "floors, no exact pins"


@pytest.mark.parametrize("path", sorted((ROOT / "FLAlgorithms" / "servers").glob("server*.py")))
def test_an_algorithm_is_two_small_files(path):
    """Near 70 lines of code, docstrings and blank lines not counted."""
    if path.stem == "serverbase":
        return
    user = ROOT / "FLAlgorithms" / "users" / path.name.replace("server", "user")
    assert sum(map(code_lines, (path, user))) <= 85
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert "Differences from the paper" in " ".join(header.split())
    assert "from the authors' code" in " ".join(header.split())


def code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    strings = [
        n.value
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    ]
    skipped = {i for s in strings for i in range(s.lineno, s.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(x.strip()) and not x.strip().startswith("#") for i, x in lines if i not in skipped
    )
