"""How fast the three scripts are and what they need, each against something to compare it with.

    python benchmarks/benchmark.py --quick                      # the main table, in three minutes
    python benchmarks/benchmark.py --data-dir data              # all of it, in half an hour
    python benchmarks/benchmark.py --only throughput --also my/ddp_train.py

All contenders run in turn, --rounds times, each in processes of its own; a ratio is that of two
runs of the same round. Figures are the median and in brackets the lowest and the highest.

- throughput: training images per second of an epoch, without start-up and evaluation, of the
  scripts and of the bare and the conventional loop in loops.py. Copies: independent runs of
  single_gpu_train.py at the same time, the ceiling for DDP. Weak scaling: the batch per process
  is fixed; strong scaling: the global batch is. --also SCRIPT: a changed ddp_train.py in addition.
- accuracy: from the start of the command to the end of the first epoch with 99 % or more on the
  test images, against the textbook recipe in loops.py; with all threads that PyTorch takes.
- start: the complete command for one epoch, less its training, against `import torch`.
- memory: private memory of a DDP process at its peak, against one that has only imported torch.
- growth: an epoch of 1, 2 and 4 times the data; of 1, 2 and 4 processes with one global batch.

Start, memory and growth are measured on the CPU. But for the accuracy each process has one thread.
"""

import argparse
import os
import platform
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import torch  # noqa: E402
from loops import WANTED  # noqa: E402

from data import load_datasets  # noqa: E402

SINGLE, PARALLEL, DDP = "single_gpu_train.py", "data_parallel_train.py", "ddp_train.py"
QUICK_IMAGES = 16000
# Without these, glibc may give memory back after each step: a loop is up to 1.6 times slower or
# not, by the luck of its heap's layout. The scripts set the like themselves.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY}

# measure() gives one figure; against: the names of the contenders that it is compared with.
Contender = namedtuple("Contender", "processes measure against", defaults=[()])


def parse_args(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    quick = f"throughput alone, 3 rounds of {QUICK_IMAGES} images"
    option("--quick", action="store_true", help=quick)
    option("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    option("--rounds", type=int, help="times that each contender runs (default: 5)")
    option("--batch-size", type=int, default=64, help="images per step and process (default: 64)")
    option("--processes", type=int, help="most DDP processes (default: GPUs, or cores)")
    option("--also", action="append", default=[], metavar="SCRIPT", help="a changed ddp_train.py")
    choices = ["auto", "mnist", "synthetic"]
    option("--dataset", choices=choices, default="auto", help="as in the scripts")
    option("--data-dir", default="data", help="folder of the data sets (default: data)")
    option("--device", choices=["auto", "cpu", "cuda"], default="auto", help="as in the scripts")
    args = parser.parse_args(argv)
    for name in ("rounds", "batch_size", "processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for script in args.also:
        if not Path(script).is_file():
            parser.error(f"--also: there is no file {script}")
    args.also = [str(Path(script).resolve()) for script in args.also]
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and not gpus:
        parser.error("--device cuda: PyTorch sees no GPU here")
    args.device = "cpu" if args.device == "cpu" or not gpus else "cuda"
    args.processes = args.processes or (gpus if args.device == "cuda" else os.cpu_count())
    args.rounds = args.rounds or (3 if args.quick else 5)
    args.only = args.only or (["throughput"] if args.quick else list(PARTS))
    return args


# Running the contenders


def write_mnist(folder, sets, times=1, most=None):
    """Write these data sets (training, test) as MNIST's four files below `folder`, and return it.

    Each training image comes `times` times; of all images in a set the first `most` are kept.
    """
    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for half, digits, repeats in zip(("train", "t10k"), sets, (times, 1)):
        images, labels = (tensor.repeat_interleave(repeats, 0)[:most] for tensor in digits.tensors)
        for kind, array in (("images-idx3", images.squeeze(1)), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape)
            (raw / f"{half}-{kind}-ubyte").write_bytes(header + array.byte().numpy().tobytes())
    return folder


def command(args, script, *options, processes=0):
    """The command of one epoch of a script on the CPU that logs once; with processes, under DDP."""
    launcher = []
    if processes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = ["-m", "torch.distributed.run"]
        launcher += [f"--nproc_per_node={processes}", f"--master_port={port}"]
    own = ["--data-dir", args.folder, "--dataset", "mnist", "--device", "cpu", "--epochs", 1]
    own += ["--log-interval", 10**6, "--output-dir", tempfile.mkdtemp()]
    return [str(part) for part in (sys.executable, *launcher, ROOT / script, *own, *options)]


def launch(words, **environment):
    """Start a command with one thread; what it prints goes to the file job.output."""
    output = tempfile.TemporaryFile("w+")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY, **environment}
    job = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
    job.output = output
    return job


def finish(jobs, watch=None):
    """What the jobs have printed when all have ended; watch(job) is called ten times a second."""
    texts = []
    try:
        for job in jobs:
            while watch and job.poll() is None:
                watch(job)
                time.sleep(0.1)
            job.wait()
            job.output.seek(0)
            texts.append(job.output.read())
            if job.returncode:
                raise SystemExit(f"error: {' '.join(job.args)} failed:\n{texts[-1]}")
    finally:
        for job in jobs:
            job.terminate()  # those that still run, after an error or a signal
            job.wait()
    return texts


def rate(job_texts):
    """The images per second of all jobs together; of several epochs the first is a warm-up."""
    total = 0
    for text in job_texts:
        rates = [float(number) for number in re.findall(r"([\d.]+) images/s", text)]
        if not rates:
            raise SystemExit(f"error: a contender gave no images/s:\n{text}")
        total += statistics.median(rates[1:] or rates)
    return total


def in_turn(args, contenders):
    """{name: [a figure of each round]} of {name: Contender}."""
    figures = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, contender in contenders.items():
            figure = contender.measure()
            figures[name].append(figure)
            print(f"round {number + 1}/{args.rounds}  {name}: {figure:,.1f}", file=sys.stderr)
    return figures


# Showing the figures


def spread(values, digits=1):
    """Median, lowest and highest as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def ratio(figures, one, other):
    """The spread of one over the other, paired by round."""
    return spread([a / b for a, b in zip(figures[one], figures[other])], 2)


def table(figures, contenders):
    """Images per second as a Markdown table; speed-up is over the single script's median."""
    lines = [
        "| strategy | processes | images/s, median | lowest–highest | speed-up | efficiency |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rates in figures.items():
        processes, middle = contenders[name].processes, statistics.median(rates)
        speedup = middle / statistics.median(figures[SINGLE])
        lines.append(
            f"| {name} | {processes} | {middle:,.0f} | {min(rates):,.0f}–{max(rates):,.0f} "
            f"| {speedup:.2f} | {100 * speedup / processes:.0f} % |"
        )
    return "\n".join(lines)


def ratios(figures, contenders):
    """One line for each pair of contenders that are compared."""
    return "\n".join(
        f"- {name} / {other}: {ratio(figures, name, other)}"
        for name, contender in contenders.items()
        for other in contender.against
    )


def heading(args, part):
    """What is measured on which processor, with the versions and the number of rounds."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = models[0] if models else name
    name = f"CPU: {name}, {os.cpu_count()} cores"
    if args.device == "cuda" and part in ("throughput", "accuracy"):
        name = f"GPU: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {name}"
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    batch = f"{args.batch_size} images per step and process, " if part == "throughput" else ""
    return (
        f"**{part}** - {name}; {versions}; {args.dataset}, {args.images:,} images; {batch}"
        f"n = {args.rounds}, median (lowest–highest)"
    )


# The parts: each measures and prints


def throughput(args):
    epochs = 4 if args.device == "cuda" else 1  # a GPU needs time to warm up

    def loop(name):
        options = ["--data-dir", args.folder, "--device", args.device, "--epochs", epochs]
        words = [sys.executable, HERE / "loops.py", name, "--batch-size", args.batch_size]
        return rate(finish([launch([str(word) for word in (*words, *options)])]))

    def script(path, batch=args.batch_size, processes=0, copies=1):
        options = ["--device", args.device, "--epochs", epochs, "--batch-size", batch]
        jobs = []
        for number in range(copies):
            words = command(args, path, *options, processes=processes)
            own_gpu = {"CUDA_VISIBLE_DEVICES": str(number)} if copies > 1 else {}
            jobs.append(launch(words, **own_gpu))
        return rate(finish(jobs))

    contenders = {
        "bare loop": Contender(1, partial(loop, "bare")),
        "conventional loop": Contender(1, partial(loop, "conventional")),
        SINGLE: Contender(1, partial(script, SINGLE), ["bare loop", "conventional loop"]),
        PARALLEL: Contender(1, partial(script, PARALLEL)),
    }
    powers = {2**power for power in range(10) if 2**power <= args.processes}
    for count in sorted(powers | {args.processes}):
        copies = f"copies x {count}"
        if count > 1:
            contenders[copies] = Contender(count, partial(script, SINGLE, copies=count))
        batches = {"weak": args.batch_size}
        if count > 1 and args.batch_size % count == 0:
            batches["strong"] = args.batch_size // count
        for path in (DDP, *args.also):
            for kind, batch in batches.items():
                against = [copies] if count > 1 and kind == "weak" else []
                against += [f"{DDP}, {kind} scaling, {count}"] if path != DDP else []
                measure = partial(script, path, batch, count)
                contenders[f"{path}, {kind} scaling, {count}"] = Contender(count, measure, against)
    figures = in_turn(args, contenders)
    print(f"{table(figures, contenders)}\n\n{ratios(figures, contenders)}")
    if args.device == "cpu" or args.processes < 2:
        print("- not measured: DataParallel over several GPUs (here it only calls the network)")


def accuracy(args):
    if args.dataset != "mnist":
        return print("- not measured: the time to 99 %, which needs MNIST")

    def until(words):
        """Seconds to the first line with the wanted accuracy."""
        began = time.perf_counter()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
            try:
                for line in job.stdout:
                    found = re.search(r"accuracy (\d+\.\d+) %", line)
                    if found and float(found[1]) >= WANTED:
                        return time.perf_counter() - began
            finally:
                job.kill()
        raise SystemExit(f"error: {' '.join(words)} ended below {WANTED} %")

    def here():
        options = ["--device", args.device, "--epochs", 3, "--log-interval", 50]
        return until(command(args, SINGLE, *options))

    textbook = [sys.executable, str(HERE / "loops.py"), "textbook", "--epochs", "14"]
    textbook += ["--data-dir", args.folder, "--device", args.device]
    contenders = {"textbook": Contender(1, partial(until, textbook)), "here": Contender(1, here)}
    figures = in_turn(args, contenders)
    print(
        f"- {WANTED:.0f} % accuracy: {SINGLE} after {spread(figures['here'])} s, the textbook "
        f"recipe after {spread(figures['textbook'])} s, {ratio(figures, 'textbook', 'here')} times "
        "as long"
    )


def epoch_seconds(args, texts, times=1):
    """How long the training steps of an epoch took, by its one log line."""
    return times * args.images / rate(texts)


def start(args):
    def seconds(words):
        began = time.perf_counter()
        texts = finish([launch(words)])
        return time.perf_counter() - began, texts

    def above(script, processes):
        total, texts = seconds(command(args, script, processes=processes))
        return total - epoch_seconds(args, texts)

    torch_alone = [sys.executable, "-c", "import torch"]
    contenders = {
        "import torch": Contender(1, lambda: seconds(torch_alone)[0]),
        SINGLE: Contender(1, partial(above, SINGLE, 0), ["import torch"]),
        f"{DDP} on 2 processes": Contender(2, partial(above, DDP, 2), ["import torch"]),
    }
    figures = in_turn(args, contenders)
    for name, values in figures.items():
        print(f"- {name}, start to exit less training: {spread(values)} s")


def private_memory(pid):
    """MB that this process alone has written, or 0 when it has ended (Linux).

    Pages of files (libraries, the data) do not count: the processes of a machine share them.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(re.search(r"^Private_Dirty: +(\d+) kB", text, re.M)[1]) / 1024


def memory(args):
    if not Path("/proc/self/smaps_rollup").exists():
        return print("- not measured: memory, which needs Linux")

    def peak(jobs, pick):
        """Of the process that pick(first job) finds, looked at ten times a second."""
        seen = [0]
        finish(jobs, lambda job: seen.extend(private_memory(pid) for pid in pick(job)))
        return max(seen)

    def worker(launcher):
        """The process of local rank 1."""
        return Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[1:2]

    def ddp():
        return peak([launch(command(args, DDP, "--log-interval", 50, processes=2))], worker)

    def imported():  # by two processes, which share the pages of libraries as two workers do
        words = [sys.executable, "-c", "import time, torch; time.sleep(2)"]
        return peak([launch(words), launch(words)], lambda job: [job.pid])

    figures = in_turn(args, {"ddp": Contender(2, ddp), "import torch": Contender(2, imported)})
    above = [a - b for a, b in zip(figures["ddp"], figures["import torch"])]
    print(
        f"- private memory of a DDP process at its peak: {spread(figures['ddp'], 0)} MB, "
        f"{spread(above, 0)} MB above import torch"
    )


def growth(args):
    def epoch(script, times, *options, processes=0):
        words = command(args, script, *options, processes=processes)
        return epoch_seconds(args, finish([launch(words)]), times)

    contenders, first = {}, "1 x the data"
    for times in (1, 2, 4):
        folder = write_mnist(f"{args.folder} x {times}", args.sets, times)
        measure = partial(epoch, SINGLE, times, "--data-dir", folder)
        contenders[f"{times} x the data"] = Contender(1, measure, [first] if times > 1 else [])
    first = f"1 process on {os.cpu_count()} cores"
    for count in (1, 2, 4):
        measure = partial(epoch, DDP, 1, "--batch-size", 64 // count, processes=count)
        name = f"{count} processes, global batch 64" if count > 1 else first
        contenders[name] = Contender(count, measure, [first] if count > 1 else [])
    figures = in_turn(args, contenders)
    print("Seconds of an epoch compared:\n\n" + ratios(figures, contenders))


PARTS = {part.__name__: part for part in (throughput, accuracy, start, memory, growth)}


def main():
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # which tidies up
    try:
        args.sets = load_datasets(args.dataset, args.data_dir)
    except OSError as error:
        raise SystemExit(f"error: {error}")
    args.dataset = args.sets[0].name
    most = QUICK_IMAGES if args.quick else None
    args.images = len(args.sets[0].tensors[1][:most])
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch  # the launcher leaves folders there
        args.folder = write_mnist(f"{scratch}/data", args.sets, most=most)
        for part in args.only:
            print(f"\n{heading(args, part)}\n", flush=True)
            PARTS[part](args)


if __name__ == "__main__":
    main()
