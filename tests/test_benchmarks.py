"""The benchmark's arithmetic, its table, what it refuses and leaves behind; never its speed."""

import re
import shutil
import signal
import sys

import pytest
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import benchmark
import gpu
import loops
from benchmark import Contender

BENCHMARK = ROOT / "benchmarks" / "benchmark.py"
DDP, OWN = "ddp_train.py, weak scaling, 2", "/own/ddp_train.py, weak scaling, 2"
FIGURES = {
    "bare loop": [100.0, 120.0, 110.0],
    "single_gpu_train.py": [90.0, 100.0, 105.0],
    "copies x 2": [200.0, 200.0, 200.0],
    DDP: [150.0, 160.0, 140.0],
    OWN: [180.0, 160.0, 175.0],
}
AGAINST = {"single_gpu_train.py": ["bare loop"], DDP: ["copies x 2"], OWN: ["copies x 2", DDP]}
CONTENDERS = {
    name: Contender(2 if "2" in name else 1, None, AGAINST.get(name, [])) for name in FIGURES
}


def test_table():
    lines = benchmark.table(FIGURES, CONTENDERS).splitlines()
    assert len(lines) == 2 + 5 and {line.count("|") for line in lines} == {7}
    assert lines[2] == "| bare loop | 1 | 110 | 100–120 | 1.10 | 110 % |"
    assert lines[5] == f"| {DDP} | 2 | 150 | 140–160 | 1.50 | 75 % |"


def test_ratios_are_paired_by_round():
    assert benchmark.ratios(FIGURES, CONTENDERS).splitlines() == [
        "- single_gpu_train.py / bare loop: 0.90 (0.83–0.95)",
        f"- {DDP} / copies x 2: 0.75 (0.70–0.80)",
        f"- {OWN} / copies x 2: 0.88 (0.80–0.90)",
        f"- {OWN} / {DDP}: 1.20 (1.00–1.25)",
    ]


def test_the_gpu_check_reads_what_the_benchmark_prints():
    assert gpu.reached("...\n\n" + benchmark.ratios(FIGURES, CONTENDERS)) == 0.9


def test_spread():
    assert benchmark.spread([4000.0, 1.0, 20.0]) == "20.0 (1.0–4,000.0)"


def test_the_rate_leaves_out_the_warm_up_and_adds_up_copies():
    assert benchmark.rate(["9 images/s", "8.5 images/s 0 s left"]) == 17.5
    assert benchmark.rate(["1 images/s\n30 images/s\n20 images/s\n25 images/s"]) == 25
    with pytest.raises(SystemExit, match="^error: a contender gave no images/s:\nepoch 1"):
        benchmark.rate(["epoch 1"])


def test_a_contender_that_fails_shows_what_it_said():
    jobs = [
        benchmark.launch([sys.executable, "-c", code])
        for code in ("1 / 0", "import time; time.sleep(60)")
    ]
    with pytest.raises(SystemExit, match="(?s)^error: .* failed:.*ZeroDivisionError"):
        benchmark.finish(jobs)
    assert jobs[1].returncode == -signal.SIGTERM  # it does not run on


def test_the_contenders_run_in_turn():
    seen = []
    contenders = {name: Contender(1, lambda name=name: seen.append(name) or 1.5) for name in "ab"}
    args = benchmark.parse_args(["--rounds", "2"])
    assert benchmark.in_turn(args, contenders) == {"a": [1.5, 1.5], "b": [1.5, 1.5]}
    assert seen == ["a", "b", "a", "b"]


def test_the_data_is_written_as_it_was_read(mnist, tmp_path):
    from data import load_datasets

    sets = load_datasets("mnist", mnist)
    copy = load_datasets("mnist", benchmark.write_mnist(tmp_path / "same", sets))
    for one, other in zip(sets, copy):
        assert all((a == b).all() for a, b in zip(one.tensors, other.tensors))
    twice = load_datasets("mnist", benchmark.write_mnist(tmp_path / "twice", sets, 2, most=1500))
    assert [len(digits) for digits in twice] == [1500, 201]
    assert (twice[0].tensors[0][1::2] == sets[0].tensors[0][:750]).all()


@pytest.mark.parametrize("program", [benchmark.parse_args, loops.main, gpu.main])
def test_help_is_the_docstring(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit):
        program()
    assert sys.modules[program.__module__].__doc__.strip() in capsys.readouterr().out


def test_quick_is_the_throughput_alone():
    args = benchmark.parse_args(["--quick"])
    assert (args.only, args.rounds) == (["throughput"], 3)
    args = benchmark.parse_args([])
    assert (args.only, args.rounds) == (["throughput", "accuracy", "start", "memory", "growth"], 5)


def test_the_heading_names_the_processor_and_how_often():
    args = benchmark.parse_args(["--device", "cpu", "--batch-size", "32"])
    args.images = 1001
    heading = benchmark.heading(args, "throughput")
    assert heading.startswith("**throughput** - CPU: ") and "PyTorch" in heading
    assert "1,001 images; 32 images per step and process, n = 5, median (low" in heading


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--also", "not/there.py"], "--also: there is no file not/there.py"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--batch-size", "-1"], "--batch-size must be at least 1"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--device", "cuda"], "--device cuda: PyTorch sees no GPU here"),
    ],
)
def test_bad_options_are_one_line(options, problem, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as end:
        benchmark.parse_args(options)
    assert end.value.code == 2 and problem in capsys.readouterr().err


def test_missing_data_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["benchmark", "--dataset", "mnist", "--data-dir", str(tmp_path)]
    )
    with pytest.raises(SystemExit, match="^error: no MNIST: .* is missing"):
        benchmark.main()


@pytest.mark.slow
def test_the_complete_throughput(mnist, tmp_path, tmp_path_factory):
    changed = tmp_path_factory.mktemp("changed") / "ddp_train.py"
    for path in ROOT.glob("*.py"):
        shutil.copy(path, changed.parent)
    options = ("--quick", "--rounds", 2, "--data-dir", mnist, "--processes", 2, "--device", "cpu")
    done = run(
        *(sys.executable, BENCHMARK, *options, "--also", changed),
        timeout=500,
        cwd=tmp_path,
        TMPDIR=str(tmp_path),
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 8 + 3 and f"{changed}, strong scaling, 2" in done.stdout
    assert "conventional loop" in done.stdout and "n = 2" in done.stdout
    assert "not measured" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux alone")
def test_what_a_training_costs_besides_its_steps(mnist, tmp_path):
    options = ("--rounds", 1, "--data-dir", mnist, "--only", "start", "memory", "growth")
    done = run(
        *(sys.executable, BENCHMARK, *options), timeout=500, cwd=tmp_path, TMPDIR=str(tmp_path)
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    figures = [re.findall(r"([\d.]+) \(([\d.]+)–([\d.]+)\)", line) for line in lines]
    assert len(lines) == 8 and all(figures), done.stdout
    for middle, low, high in sum(figures, []):
        assert 0 < float(low) <= float(middle) <= float(high)
    assert lines[3].endswith("above import torch") and lines[5].startswith("- 4 x the data")
    assert not list(tmp_path.iterdir())
