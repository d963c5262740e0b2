"""What only a machine with a GPU can show, on one GPU, in ten minutes.

    python benchmarks/gpu.py --data-dir data

1. tests/test_gpu.py: training on the GPU as on the CPU, NCCL in one process, gloo in two processes
   on one GPU, and by torch.profiler that nothing waits for the GPU between two log lines.
2. The throughput table with 64 and with 512 images per step: single_gpu_train.py must reach
   0.95 of the bare loop.

Without a GPU the tests that need none run, and the rest is skipped with the reason.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.95  # of the bare loop


def reached(text):
    """The ratio of the single script to the bare loop in the benchmark's text, a median."""
    return float(re.search(r"^- single_gpu_train\.py / bare loop: ([\d.]+) ", text, re.M)[1])


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data-dir", default="data", help="folder of the data sets")
    args = parser.parse_args()
    data_dir = str(Path(args.data_dir).resolve())
    tests = [sys.executable, "-m", "pytest", "-v", "-rs", "tests/test_gpu.py"]
    failed = subprocess.run(tests, cwd=ROOT).returncode != 0
    if not torch.cuda.is_available():
        print("skipped: the throughput table, as PyTorch sees no GPU here")
        raise SystemExit(failed)
    for size in (64, 512):
        words = [sys.executable, "benchmarks/benchmark.py", "--only", "throughput", "--rounds", "3"]
        words += ["--device", "cuda", "--processes", "1", "--data-dir", data_dir]
        words += ["--batch-size", str(size)]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        if done.returncode:
            raise SystemExit(done.returncode)
        short = reached(done.stdout) < WANTED
        print(f"{size} images: {reached(done.stdout)} of the bare loop, {WANTED} wanted")
        failed = failed or short
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
