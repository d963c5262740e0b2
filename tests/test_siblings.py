"""The diff is the lesson: the three scripts are siblings, and short.

The README marks the lines in which they may differ, and test_docs.py holds it against the scripts.
"""

import difflib
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, run

HERE = Path(__file__).parent
LIMITS = {"single_gpu_train.py": 130, "data_parallel_train.py": 138, "ddp_train.py": 160}


def diff(script):
    """The lines that `script` adds to and drops from the baseline."""
    lines = [(ROOT / name).read_text().splitlines() for name in (SCRIPTS[0], script)]
    return [
        line
        for line in difflib.unified_diff(*lines, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]


@pytest.mark.parametrize("script, most", [(SCRIPTS[1], 8), (SCRIPTS[2], 50)])
def test_the_diffs_are_short(script, most):
    assert sum(line.startswith("+") for line in diff(script)) <= most


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_are_short(script):
    lines = (ROOT / script).read_text().splitlines()
    assert len(lines) <= LIMITS[script]
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if re.search(r"; *\w", line.split("#")[0])]


def test_no_line_is_too_long_and_python_3_8_can_read_all():
    for path in [*ROOT.glob("*.py"), *HERE.glob("*.py")]:
        text = path.read_text()
        assert max(map(len, text.splitlines())) <= 100, path
        compile(text, str(path), "exec", dont_inherit=True)
        if sys.version_info[:2] > (3, 8):
            import ast

            ast.parse(text, feature_version=(3, 8))


def test_the_scripts_import_only_what_they_may():
    allowed = {"torch", "numpy", "data", "model"}
    for name in (*SCRIPTS, "data.py", "model.py"):
        found = set(re.findall(r"^\s*(?:import|from) (\w+)", (ROOT / name).read_text(), re.M))
        standard = getattr(sys, "stdlib_module_names", None)
        if standard is None:
            pytest.skip("Python 3.10 knows the names of its own modules, older ones do not")
        assert found - standard <= allowed | {"torchvision"}


def test_only_the_modules_that_were_agreed_lie_at_the_top():
    assert {path.name for path in ROOT.glob("*.py")} == {*SCRIPTS, "data.py", "model.py"}


def test_no_script_changes_the_environment():
    for name in (*SCRIPTS, "data.py", "model.py"):
        text = (ROOT / name).read_text()
        assert not re.search(r"environ\[[^]]*\] *=|putenv|set_num_threads|environ.update", text)


def test_importing_a_script_runs_nothing(tmp_path):
    for script in SCRIPTS:
        run(sys.executable, "-c", f"import {script[:-3]}", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert not list(tmp_path.iterdir())
