"""The benchmark's arithmetic and its table; never its speed."""

import json
import re
import shutil
import sys

import pytest
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import costs  # noqa: E402
import throughput  # noqa: E402

FIGURES = {
    "bare loop": [100.0, 120.0, 110.0],
    "single_gpu_train.py": [90.0, 100.0, 105.0],
    "copies x 2": [200.0, 200.0, 200.0],
    "ddp_train.py, weak scaling, 2": [150.0, 160.0, 140.0],
}
PROCESSES = {name: 2 if "2" in name else 1 for name in FIGURES}


def test_summary():
    rows = {row[0]: row[1:] for row in throughput.summarise(FIGURES, PROCESSES)}
    assert rows["bare loop"] == (1, 110, 100, 120, 1.1, 1.1)
    assert rows["ddp_train.py, weak scaling, 2"] == (2, 150, 140, 160, 1.5, 0.75)


def test_ratios_are_paired_by_round():
    ratios = {what: figures for what, *figures in throughput.ratios(FIGURES)}
    assert ratios["single_gpu_train.py / bare loop"] == pytest.approx([0.9, 100 / 120, 105 / 110])
    assert ratios["ddp_train.py, weak scaling, 2 / copies x 2"] == [0.75, 0.7, 0.8]


def test_a_changed_script_is_compared_with_ours():
    own = {"/own/ddp_train.py, weak scaling, 2": [180.0, 160.0, 175.0]}
    ratios = {what: figures for what, *figures in throughput.ratios({**FIGURES, **own})}
    name = next(iter(own))
    assert ratios[f"{name} / copies x 2"] == [0.875, 0.8, 0.9]
    assert ratios[f"{name} / ddp_train.py, weak scaling, 2"] == [1.2, 1, 1.25]
    assert len(ratios) == 4  # with the two of ours, as FIGURES has no conventional loop


def test_table():
    lines = throughput.table(throughput.summarise(FIGURES, PROCESSES)).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[-1].count("|")
    assert lines[-1] == "| ddp_train.py, weak scaling, 2 | 2 | 150 | 140–160 | 1.50 | 75 % |"


@pytest.mark.slow
def test_the_complete_benchmark(mnist, tmp_path, tmp_path_factory):
    changed = tmp_path_factory.mktemp("changed") / "ddp_train.py"
    for path in ROOT.glob("*.py"):
        shutil.copy(path, changed.parent)
    script = ROOT / "benchmarks" / "throughput.py"
    command = (sys.executable, script, "--rounds", 2, "--data-dir", mnist, "--processes", 2,
               "--device", "cpu", "--also", changed,
               "--json", tmp_path / "result.json")  # fmt: skip
    done = run(*command, timeout=300, cwd=tmp_path, TMPDIR=str(tmp_path))
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 8 + 3 and f"{changed}, strong scaling, 2" in done.stdout
    assert "conventional loop" in done.stdout and "n = 2" in done.stdout
    assert "not measured" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert all(len(rates) == 2 for rates in result["images_per_second"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux alone")
def test_what_a_training_costs_besides_its_steps(mnist, tmp_path):
    script = ROOT / "benchmarks" / "costs.py"
    parts = ("--only", "start", "memory", "growth")
    done = run(sys.executable, script, "--rounds", 1, "--data-dir", mnist, *parts, timeout=300,
               cwd=tmp_path, TMPDIR=str(tmp_path))  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    figures = [re.findall(r"([\d.]+) \(([\d.]+)–([\d.]+)\)", line) for line in lines]
    assert len(lines) == 7 and all(figures), done.stdout
    for middle, least, most in sum(figures, []):
        assert float(least) <= float(middle) <= float(most)
    assert re.search("import torch$", lines[2]) and "4 x the data" in lines[4]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("benchmark", [costs, throughput])
def test_help_is_the_docstring(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit):
        benchmark.parse_args()
    assert benchmark.__doc__.strip() in capsys.readouterr().out


def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["throughput", "--also", str(tmp_path)])
    with pytest.raises(SystemExit):
        throughput.parse_args()
    assert f"--also: there is no file {tmp_path}" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["costs", "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="^error: no MNIST: .* is missing.*; see --data-dir$"):
        costs.main()


def test_spread_and_ratio():
    figures = {"here": [1.0, 2.0, 4.0], "textbook": [10.0, 18.0, 48.0]}
    assert costs.spread(figures["here"]) == "2.0 (1.0–4.0)"
    assert costs.ratio(figures, "textbook", "here") == "10.00 (9.00–12.00)"
