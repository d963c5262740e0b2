"""The benchmark's arithmetic, its table, what it refuses and leaves behind; never its speed."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT, copy_scripts, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import benchmark

import harness
from data import load_datasets

BENCHMARK = ROOT / "benchmarks" / "benchmark.py"
FIGURES = {"bare": [100.0, 120.0, 110.0], "ours": [90.0, 100.0, 105.0], "start": [3.0, 4000.0, 20]}
FIGURES["epoch"] = [0.04, 0.05, 0.041]
CONTENDERS = {"bare": [None], "ours": [None, "bare"], "start": [None, "bare", "ours"]}


def test_report_is_a_table_and_ratios_paired_by_round():
    lines = benchmark.report("images/s", FIGURES, CONTENDERS).splitlines()
    assert lines[:6] == [
        "| contender | images/s, median | lowest–highest |",
        "| --- | ---: | ---: |",
        "| bare | 110 | 100–120 |",
        "| ours | 100.0 | 90.0–105.0 |",
        "| start | 20.0 | 3.0–4,000.0 |",
        "| epoch | 0.041 | 0.040–0.050 |",
    ]
    assert lines[7] == "- ours / bare: 0.90 (0.83–0.95)" and len(lines) == 10


def test_the_rate_leaves_out_the_warm_up_and_adds_up_copies():
    assert benchmark.rate(["9 images/s", "8.5 images/s 0 s left"]) == 17.5
    assert benchmark.rate(["1 images/s\n30 images/s\n20 images/s\n25 images/s"]) == 25


def test_a_contender_that_fails_shows_what_it_said():
    codes = "1 / 0", "import time; time.sleep(60)"
    jobs = [benchmark.launch([sys.executable, "-c", code]) for code in codes]
    with pytest.raises(harness.Problem, match="(?s) failed:.*ZeroDivisionError"):
        benchmark.finish(jobs)
    assert jobs[1].returncode == -signal.SIGTERM  # it does not run on


def test_the_contenders_run_in_turn():
    seen = []
    contenders = {name: [lambda name=name: seen.append(name) or 1.5] for name in "ab"}
    assert benchmark.in_turn(2, contenders) == {"a": [1.5, 1.5], "b": [1.5, 1.5]}
    assert seen == ["a", "b", "a", "b"]


def test_the_data_is_written_as_it_was_read(mnist, tmp_path):
    sets = load_datasets("mnist", mnist)
    copy = load_datasets("mnist", benchmark.write_mnist(tmp_path / "same", sets))
    for one, other in zip(sets, copy):
        assert all((a == b).all() for a, b in zip(one.tensors, other.tensors))
    part = load_datasets("mnist", benchmark.write_mnist(tmp_path / "part", sets, 700))
    assert [len(digits) for digits in part] == [700, 201]


def test_options(capsys, tmp_path):
    args = benchmark.parse_args(["--quick"])
    assert (args.only, args.rounds) == (["throughput"], 3)
    args = benchmark.parse_args(["--device", "cpu", "--batch-size", "32"])
    assert (args.only, args.rounds) == (["throughput", "accuracy", "start", "memory", "growth"], 5)
    args.images, args.sets = 1001, load_datasets("synthetic", tmp_path)
    heading = benchmark.heading(args, "throughput")
    assert heading.startswith("**throughput** - CPU: ") and "PyTorch" in heading
    assert heading.endswith("1,001 images of synthetic, 32 per step and process; n = 5")
    with pytest.raises(SystemExit):
        benchmark.parse_args(["--help"])
    assert benchmark.__doc__.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--also", "not/there.py"], "No such file or directory"),
        (["--also", "tests"], "Is a directory"),
        (["--rounds", "0"], "--rounds: must be above 0"),
        (["--batch-size", "-1"], "--batch-size: must be above 0"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--device", "cuda"], "--device cuda: PyTorch sees no GPU here"),
    ],
)
def test_bad_options(options, problem, monkeypatch):
    monkeypatch.setattr(benchmark.torch.cuda, "device_count", lambda: 0)
    with pytest.raises((harness.Problem, OSError), match=problem):
        benchmark.parse_args(options)


@pytest.mark.slow
def test_the_complete_throughput(mnist, tmp_path, tmp_path_factory):
    changed = copy_scripts(tmp_path_factory.mktemp("changed")) / "ddp_train.py"
    options = ["--quick", "--rounds", 2, "--data-dir", mnist, "--processes", 2, "--device", "cpu"]
    options += ["--also", changed]
    done = run(sys.executable, BENCHMARK, *options, timeout=500, cwd=tmp_path, TMPDIR=str(tmp_path))
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 7 + 2 and f"- {changed}, processes: 2 / ddp_train.py" in done.stdout
    assert "conventional loop" in done.stdout and "n = 2" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux alone")
def test_what_a_training_costs_besides_its_steps(mnist, tmp_path):
    options = ["--rounds", 1, "--data-dir", mnist, "--only", "start", "memory", "growth"]
    done = run(sys.executable, BENCHMARK, *options, timeout=500, cwd=tmp_path, TMPDIR=str(tmp_path))
    figures = re.findall(r"\| ([\d.,]+) \| ([\d.,]+)–([\d.,]+) \|", done.stdout)
    assert len(figures) == 3 + 1 + 6
    for figure in figures:
        middle, low, high = (float(number.replace(",", "")) for number in figure)
        assert 0 < low == middle == high
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(benchmark.torch.cuda.is_available(), reason="for a machine without a GPU")
def test_the_gpu_script_says_what_is_missing(mnist):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", ROOT / "benchmarks" / "gpu.sh", mnist, code=1, timeout=200, PATH=path)
    assert "passed" in done.stdout and "needs a GPU" in done.stdout
    assert done.stderr.endswith("PyTorch sees no GPU here, or use --device cpu\n")
