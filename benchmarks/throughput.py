"""Training throughput of the three scripts, with two loops to compare them with.

    python benchmarks/throughput.py --data-dir data --json result.json

All contenders run in turn, --rounds times, each in processes of its own with one thread each; what
is counted are the training images per second of one epoch, without start-up and evaluation. The
result is a Markdown table on stdout, and with --json all figures in a file.

- bare loop: the network and the batches of the scripts, data ready as floats, nothing else.
- conventional loop: torchvision's MNIST with ToTensor and Normalize in a plain DataLoader.
- copies: independent single_gpu_train.py runs at the same time, the ceiling for DDP.
- weak scaling: the batch per process is fixed; strong scaling: the global batch is.
- --also SCRIPT: a changed ddp_train.py (say, with a recipe), measured in turn with the others.

The variables that keep glibc from giving memory back after each step (MALLOC_TRIM_THRESHOLD_ and
MALLOC_MMAP_THRESHOLD_) are set for all: without them a loop is up to 1.6 times slower or not, by
the luck of its heap's layout, and a comparison would compare that. The scripts do it themselves.
"""

import argparse
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data import MEAN, STD, load_datasets  # noqa: E402
from model import Net  # noqa: E402

SINGLE, PARALLEL, DDP = "single_gpu_train.py", "data_parallel_train.py", "ddp_train.py"
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--rounds", type=int, default=5, help="times that each contender runs (default: 5)")
    option("--batch-size", type=int, default=64, help="images per step and process (default: 64)")
    option("--processes", type=int, help="most DDP processes (default: GPUs, or cores)")
    option("--also", action="append", default=[], metavar="SCRIPT", help="a changed ddp_train.py")
    option(
        "--dataset", choices=["auto", "mnist", "synthetic"], default="auto", help="as the scripts"
    )
    option("--data-dir", default="data", help="folder of the data sets (default: data)")
    option("--device", choices=["auto", "cpu", "cuda"], default="auto", help="as the scripts")
    option("--json", help="file for all figures")
    option("--loop", choices=["bare", "conventional"], help=argparse.SUPPRESS)  # a contender's run
    args = parser.parse_args()
    for name in ("rounds", "batch_size", "processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    args.also = [str(Path(script).resolve()) for script in args.also]
    for script in args.also:
        if not Path(script).is_file():
            parser.error(f"--also: there is no file {script}")
    return args


def train(loader, device, memory_format):
    """One epoch with the scripts' optimizer; returns training images per second."""
    net = Net().to(device, memory_format=memory_format)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    count, began = 0, time.perf_counter()
    for images, labels in loader:
        loss = net(images.to(device), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        count += len(labels)
    loss.item()  # waits for the GPU
    return count / (time.perf_counter() - began)


def bare_loop(args, device):
    """The network alone: the data is ready as floats on the device, nothing is logged."""
    images, labels = load_datasets(args.dataset, args.data_dir)[0][slice(None)]
    images, labels = images.to(device), labels.to(device)
    order = torch.randperm(len(labels), device=device).split(args.batch_size)
    batches = ((images[index], labels[index]) for index in order)
    return train(batches, device, torch.channels_last)


def conventional_loop(args, device):
    """What most examples do: images one by one through PIL and two transforms."""
    from torchvision import datasets, transforms

    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    mnist = datasets.MNIST(args.data_dir, train=True, transform=steps)
    loader = torch.utils.data.DataLoader(mnist, batch_size=args.batch_size, shuffle=True)
    return train(loader, device, torch.contiguous_format)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(commands, environment):
    """Run these commands at the same time; returns the images per second of all, added up."""
    jobs = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY, **extra},
        )
        for command, extra in zip(commands, environment)
    ]
    rates = []
    try:
        for job in jobs:
            out, errors = job.communicate()
            found = re.findall(r"([\d.]+) images/s", out)
            if job.returncode or not found:
                words = " ".join(job.args)
                raise SystemExit(f"error: {words} failed or gave no images/s:\n{out}{errors}")
            rates.append(float(found[-1]))
    finally:
        for job in jobs:
            job.terminate()  # those that still run, after an error or a signal
    return sum(rates)


def contenders(args, processes, gpus, scratch):
    """{name: (processes, commands, environments)} of all that is to be measured."""
    common = ["--dataset", args.dataset, "--data-dir", args.data_dir, "--device", args.device]
    loop = [sys.executable, __file__, *common, "--batch-size", str(args.batch_size)]

    def script(name, batch, launcher=()):
        output = tempfile.mkdtemp(dir=scratch)
        options = ["--epochs", "1", "--log-interval", "1000000", "--batch-size", str(batch)]
        return [
            sys.executable,
            *launcher,
            str(ROOT / name),
            *common,
            *options,
            "--output-dir",
            output,
        ]

    def launcher(count):
        port = f"--master_port={free_port()}"
        return ["-m", "torch.distributed.run", f"--nproc_per_node={count}", port]

    def ddp(name, batch, count):
        return [script(name, batch, launcher(count))]

    plain = [{}]
    # Where a command is made again for each round, so is its output folder and its port.
    found = {
        "bare loop": (1, lambda: [[*loop, "--loop", "bare"]], plain),
        "conventional loop": (1, lambda: [[*loop, "--loop", "conventional"]], plain),
        SINGLE: (1, lambda: [script(SINGLE, args.batch_size)], plain),
        PARALLEL: (1, lambda: [script(PARALLEL, args.batch_size)], plain),
    }
    if args.dataset != "mnist":
        del found["conventional loop"]
    counts = [count for count in (2**power for power in range(10)) if count <= processes]
    for count in sorted({*counts, processes}):
        visible = [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(count)] if gpus else [{}] * count
        if count > 1:
            found[f"copies x {count}"] = (
                count,
                lambda count=count: [script(SINGLE, args.batch_size) for _ in range(count)],
                visible,
            )
        for name in (DDP, *args.also):
            scaling = {"weak": args.batch_size}
            if count > 1 and args.batch_size % count == 0:
                scaling["strong"] = args.batch_size // count
            for kind, batch in scaling.items():
                found[f"{name}, {kind} scaling, {count}"] = (
                    count,
                    partial(ddp, name, batch, count),
                    plain,
                )
    return found


def summarise(figures, processes, baseline=SINGLE):
    """[(name, processes, median, least, most, speed-up, efficiency)] from {name: [images/s]}.

    The speed-up is that of the median over the baseline's; the efficiency is it per process.
    """
    base = statistics.median(figures[baseline])
    rows = []
    for name, rates in figures.items():
        middle = statistics.median(rates)
        speedup = middle / base
        rows.append(
            (
                name,
                processes[name],
                middle,
                min(rates),
                max(rates),
                speedup,
                speedup / processes[name],
            )
        )
    return rows


def table(rows):
    """The rows of summarise() as a Markdown table."""
    lines = [
        "| strategy | processes | images/s, median | min–max | speed-up | efficiency |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, processes, middle, least, most, speedup, efficiency in rows:
        lines.append(
            f"| {name} | {processes} | {middle:,.0f} | {least:,.0f}–{most:,.0f} "
            f"| {speedup:.2f} | {100 * efficiency:.0f} % |"
        )
    return "\n".join(lines)


def ratios(figures):
    """[(what, median, least, most)]: ratios of two contenders, paired by round."""
    pairs = [(SINGLE, "bare loop"), (SINGLE, "conventional loop")]
    for name in figures:
        count = name.rpartition(" ")[2]
        if ", weak scaling, " in name and f"copies x {count}" in figures:
            pairs.append((name, f"copies x {count}"))
        plain = re.sub(r"^.*(?=, \w+ scaling, )", DDP, name)
        if plain != name:  # of --also
            pairs.append((name, plain))
    found = []
    for one, other in pairs:
        if one in figures and other in figures:
            values = [a / b for a, b in zip(figures[one], figures[other])]
            found.append((f"{one} / {other}", statistics.median(values), min(values), max(values)))
    return found


def machine():
    """One line about the processor, the GPUs and the versions."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = models[0] if models else name
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"{name}, {os.cpu_count()} cores, {len(gpus)} GPUs{': ' if gpus else ''}{', '.join(gpus)}; "
        f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    )


def main():
    args = parse_args()
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    device = torch.device("cuda" if gpus else "cpu")
    if args.loop:
        loops = {"bare": bare_loop, "conventional": conventional_loop}
        print(f"{loops[args.loop](args, device)} images/s")
        return
    if args.json:
        open(args.json, "a").close()  # can it be written? better now than after the measurement
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # which tidies up
    args.dataset = load_datasets(args.dataset, args.data_dir)[0].name  # once, before anything
    processes = args.processes or gpus or os.cpu_count()
    figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch  # the launcher leaves a folder there in each run
        todo = contenders(args, processes, gpus, scratch)
        for number in range(args.rounds):
            for name, (_, commands, environment) in todo.items():
                rate = run(commands(), environment)
                figures.setdefault(name, []).append(rate)
                print(
                    f"round {number + 1}/{args.rounds}  {name}: {rate:,.0f} images/s",
                    file=sys.stderr,
                )
    rows = summarise(figures, {name: count for name, (count, _, _) in todo.items()})
    about = f"{machine()}; {args.dataset}, {args.batch_size} images a step and process"
    about += f", n = {args.rounds}"
    print(f"\n{about}\n\n{table(rows)}\n")
    for what, middle, least, most in ratios(figures):
        print(f"- {what}: {middle:.2f} ({least:.2f}–{most:.2f})")
    if args.dataset != "mnist":
        print("- not measured: the conventional loop, which needs MNIST")
    if gpus < 2:
        print(f"- not measured: DataParallel over GPUs ({gpus} here: it only calls the network)")
    if args.json:
        content = {"about": about, "images_per_second": figures, "ratios": ratios(figures)}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
