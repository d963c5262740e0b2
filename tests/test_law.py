"""The law of the house: one lesson per file, and siblings that differ only to teach."""

import ast
import difflib
import re
import sys

import pytest
from conftest import ROOT, SCRIPTS, run, train, weights

MODULES = ("model.py", "data.py", "synthetic_digits.py", "harness.py")
LIMITS = {
    "model.py": 40,
    "data.py": 163,
    "synthetic_digits.py": 85,
    "harness.py": 390,
    "single_gpu_train.py": 112,
    "data_parallel_train.py": 114,
    "ddp_train.py": 132,
}


def source(name):
    return (ROOT / name).read_text(encoding="utf-8")


def lesson(script):
    """(added lines, dropped lines) outside of the docstring and the imports."""
    texts = []
    for name in (SCRIPTS[0], script):
        text = re.sub(r'\A""".*?"""\n', "", source(name), flags=re.S)
        texts.append([line for line in text.splitlines() if not re.match("import|from", line)])
    lines = list(difflib.ndiff(*texts))
    return [[line[2:] for line in lines if line.startswith(mark)] for mark in "+-"]


def imports(name):
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_files_are_small(name):
    assert len(source(name).splitlines()) <= LIMITS[name]
    statements = [node for node in ast.walk(ast.parse(source(name))) if isinstance(node, ast.stmt)]
    simple = [node.lineno for node in statements if not hasattr(node, "body")]
    assert len(simple) == len(set(simple)), "two statements in one line"


def test_data_parallel_differs_by_the_wrapper_and_the_loss():
    added, dropped = lesson("data_parallel_train.py")
    assert [line.split(" = ")[0].strip() for line in added] == ["model", "loss"]
    assert [line.split(" = ")[0].strip() for line in dropped] == ["model", "loss"]


def test_ddp_differs_by_few_lines():
    assert len(lesson("ddp_train.py")[0]) <= 34


def test_who_imports_whom():
    ours = {name[:-3] for name in (*MODULES, *SCRIPTS)}
    assert imports("model.py") & ours == imports("harness.py") & ours == set()
    assert imports("synthetic_digits.py") & ours == set()
    assert imports("data.py") & ours == {"synthetic_digits"}
    for script in SCRIPTS:
        assert imports(script) & ours == {"model", "data", "harness"}
    assert {path.name for path in ROOT.glob("*.py")} == {*MODULES, *SCRIPTS}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python 3.10 knows its own modules' names")
def test_only_the_packages_that_were_agreed():
    allowed = {"torch", "numpy", "torchvision", *(name[:-3] for name in MODULES)}
    for name in (*MODULES, *SCRIPTS):
        assert imports(name) - sys.stdlib_module_names <= allowed, name


def calls(name):
    """The names of all methods and functions that a file calls."""
    nodes = [node.func for node in ast.walk(ast.parse(source(name))) if isinstance(node, ast.Call)]
    return {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}


def test_nothing_in_harness_computes_and_data_knows_no_group():
    assert not calls("harness.py") & {"backward", "step", "forward", "zero_grad", "all_reduce"}
    assert not re.search(r"\bnet\(|\bmodel\(", source("harness.py"))
    assert "distributed" not in source("data.py") and "dist." not in source("data.py")


def test_the_strategy_is_visible_in_ddp_train():
    text = source("ddp_train.py")
    for what in (
        "LOCAL_RANK", "join_group", "dist.barrier()", "DistributedSampler(", "set_epoch(",
        "DataLoader(", "DistributedDataParallel(", "dist.all_reduce(", "if rank == 0:",
        "net.state_dict()", ".cpu()", "set_seed(", "destroy_process_group", "net.eval()",
    ):  # fmt: skip
        assert what in text, what
    for script in SCRIPTS:
        assert not re.search(r"from harness|import \*", source(script))


def test_lines_are_short_and_python_3_8_can_read_all():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert max(map(len, text.splitlines())) <= 100, path
        ast.parse(text, feature_version=(3, 8))


def test_copies_do_not_block_only_from_pinned_memory():
    """Elsewhere the source of a copy that is under way could be freed already."""
    for script in SCRIPTS:
        assert re.findall(r"non_blocking=(\w+)", source(script)) == ["pinned"] * 2
        assert 'pinned = device.type == "cuda"' in source(script)
        assert '"pin_memory": pinned' in source(script)


def test_no_script_changes_the_environment():
    for name in (*SCRIPTS, *MODULES):
        changes = r"environ\[[^]]*\] *=|environ\.(update|setdefault|pop|clear)|putenv|num_threads"
        assert not re.search(changes, source(name))


def test_importing_reads_writes_and_runs_nothing(tmp_path):
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append((event, str(args[0]))) if event in
                 ("open", "socket.connect", "os.mkdir") else None)
import torch, numpy, torch.utils.data, torch.distributed
import torch.nn.parallel, torch.optim.lr_scheduler
opened.clear()
import single_gpu_train, data_parallel_train, ddp_train
from data import train_dataset, test_dataset
opened = [what for what in opened if not what[1].endswith((".py", ".pyc", "__pycache__"))
          and "__pycache__" not in what[1]]
assert not opened, opened
"""
    run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert not list(tmp_path.iterdir())


# What remains when the harness is deleted: each line that begins with it goes, or becomes this.
STRIPPED = (
    (r"import harness\n", "import argparse\nfrom pathlib import Path\n"),
    (r"^@harness.*\n", ""),
    (r"harness\.ArgumentParser\(description=__doc__\)", "argparse.ArgumentParser()"),
    (r"harness\.above\(-?\d, (\w+)\)", r"\1"),
    (r"harness\.pick_device\(.*?\)", 'torch.device("cpu")'),
    (r"harness\.join_group\(", "dist.init_process_group("),
    (r"folder, checkpoint = harness\..*", "folder = Path(args.output_dir)"),
    (r"harness\.load\(.*\)", "0"),
    (r"^ *log = harness.*\n", ""),
    (r"log\.train\(.*\)", "print(epoch, step, loss.item())"),
    (r"log\.test\(.*\)", "print(epoch, loss / count, correct / count)"),
    (r"harness\.save\(.*\)", 'torch.save(weights, folder / "model.pth")'),
    (r"harness\.start\(main\)", "main()"),
)


@pytest.mark.parametrize("strategy, processes", [("single", None), ("ddp", 2)])
def test_without_the_harness_a_working_training_remains(strategy, processes, mnist, tmp_path):
    name = "ddp_train.py" if processes else "single_gpu_train.py"
    text = source(name)
    for pattern, replacement in STRIPPED:
        text, count = re.subn(pattern, replacement, text, flags=re.M)
        assert count or "join_group" in pattern, pattern
    assert "harness" not in text and "log." not in text
    (tmp_path / "stripped").mkdir()
    script = tmp_path / "stripped" / name
    script.write_text(text)
    options = {"epochs": 2, "batch_size": 50, "processes": processes}
    train(strategy, mnist, tmp_path / "real", **options)
    out = tmp_path / "stripped"
    train(strategy, mnist, out, script=script, env={"PYTHONPATH": str(ROOT)}, **options)
    one, other = weights(tmp_path / "real"), weights(out)
    assert all((one[key] == other[key]).all() for key in one)
