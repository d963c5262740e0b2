#!/usr/bin/env bash
# What a CPU cannot show, on one GPU in ten minutes: bash benchmarks/gpu.sh DATA. The tests of the
# GPU (NCCL, gloo in two processes, a profile in which nothing waits between two log lines) and the
# throughput with 64 and 512 images, of which "single_gpu_train.py / bare loop" should reach 0.95.
set -euo pipefail
data=$(realpath -m "${1:-data}")
cd "$(dirname "$0")/.."
python -m pytest -v tests/test_gpu.py
for size in 64 512; do
    python benchmarks/benchmark.py --only throughput --rounds 3 --device cuda --processes 1 \
        --batch-size $size --data-dir "$data"
done
