"""There are no import cycles between Motley's modules.

import-linter (`make lint`) checks that imports point downwards between packages. This also looks inside
packages, at imports for annotations (`TYPE_CHECKING`) and at imports inside functions.
"""

from __future__ import annotations

import ast
from pathlib import Path

import motley

PACKAGE = Path(motley.__file__).parent


def module_files() -> dict[str, Path]:
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = ["motley", *file.relative_to(PACKAGE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        files[".".join(parts)] = file
    return files


def imported_modules(file: Path, known: set[str]) -> set[str]:
    """Return the modules of the package that a file names in an import statement."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                imported.add(submodule if submodule in known else node.module)
    return imported & known


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other: take away modules that import no other one,
    and then those that no other one imports, until only cycles are left.
    """
    left = {module: set(imports) for module, imports in graph.items()}
    while True:
        leaves = {module for module, imports in left.items() if not imports & left.keys()}
        used = set().union(*left.values()) if left else set()
        removed = leaves | (left.keys() - used)
        if not removed:
            return [sorted(left)] if left else []
        left = {
            module: imports - removed for module, imports in left.items() if module not in removed
        }


def test_no_module_imports_itself_by_a_detour() -> None:
    files = module_files()
    graph = {
        module: imported_modules(file, set(files)) - {module} for module, file in files.items()
    }
    assert sum(len(imports) for imports in graph.values()) > 500  # the files were found and read
    assert cycles(graph) == []


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
