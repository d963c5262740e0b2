"""How fast the three scripts are and what they need, each against something to compare it with.

    python benchmarks/benchmark.py --quick                      # the main table, in three minutes
    python benchmarks/benchmark.py --data-dir data              # all, in half an hour to an hour
    python benchmarks/benchmark.py --only throughput --also my/ddp_train.py

All contenders run in turn, --rounds times, each in processes of its own; a ratio is that of two
runs of the same round. docs/benchmarks.md says what each figure means. Start, memory and growth
are measured on the CPU. Except for the accuracy each process has one thread.
"""

import os
import platform
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from loops import WANTED  # noqa: E402

import harness  # noqa: E402
from data import load_datasets  # noqa: E402

SINGLE, PARALLEL, DDP = "single_gpu_train.py", "data_parallel_train.py", "ddp_train.py"
# Without the last two, glibc may give memory back after each step: a loop is up to 1.6 times slower
# or not, by the luck of its heap's layout. The scripts set the like themselves.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
}


def parse_args(argv=None):
    parser = harness.ArgumentParser(description=__doc__)
    option, count = parser.add_argument, harness.above(0, int)
    option("--quick", action="store_true", help="throughput of 16,000 images, in 3 rounds")
    option("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    option("--rounds", type=count, help="times that each contender runs (default: 5)")
    option("--batch-size", type=count, default=64, help="images per step and process (default: 64)")
    option("--processes", type=count, help="most DDP processes (default: GPUs, or cores)")
    option("--also", type=Path, action="append", default=[], help="a changed ddp_train.py")
    option("--data-dir", default="data", help="folder of the data sets (default: data)")
    option("--device", choices=["auto", "cpu", "cuda"], default="auto", help="as in the scripts")
    args = parser.parse_args(argv)
    args.device = "cuda" if harness.pick_device(args.device).type == "cuda" else "cpu"
    args.processes = args.processes or torch.cuda.device_count() or os.cpu_count()
    args.also = [path.resolve(strict=True) for path in args.also if path.read_text()]
    args.rounds = args.rounds or (3 if args.quick else 5)
    args.only = args.only or (["throughput"] if args.quick else list(PARTS))
    return args


def write_mnist(folder, sets, most=None):
    """Write `most` images of each data set as MNIST's files below `folder`, and return it."""
    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for half, digits in zip(("train", "t10k"), sets):
        images, labels = (tensor[:most].byte() for tensor in digits.tensors)
        for kind, array in (("images-idx3", images.squeeze(1)), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.dim()}I", 0, 8, array.dim(), *array.shape)
            (raw / f"{half}-{kind}-ubyte").write_bytes(header + array.numpy().tobytes())
    return folder


def command(args, script, *options, processes=0):
    """The command of one epoch of a script on the CPU that logs once; with processes, under DDP."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    own = ["--data-dir", args.folder, "--dataset", "mnist", "--device", "cpu", "--epochs", 1]
    own += ["--batch-size", args.batch_size, "--log-interval", 10**6]
    own += ["--output-dir", tempfile.mkdtemp(), *options]
    return [sys.executable, *(launcher if processes else []), ROOT / script, *own]


def loop(args, name, epochs, batch_size):
    """The command of a loop of loops.py."""
    code = f"import loops; loops.{name}({args.folder!r}, {args.device!r}, {epochs}, {batch_size})"
    return [sys.executable, "-c", code]


def launch(words, **environment):
    """Start a command; what it prints goes to the file job.output."""
    words, output = [str(word) for word in words], tempfile.TemporaryFile("w+")
    environment = {**os.environ, **ENVIRONMENT, **environment}
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
                raise harness.Problem(f"{' '.join(job.args)} failed:\n{texts[-1]}")
    finally:
        for job in jobs:
            job.terminate()  # those that still run, after an error or a signal
            job.wait()
    return texts


def rate(texts):
    """The images per second of all jobs together; of several epochs the first is a warm-up."""
    total = 0
    for text in texts:
        rates = [float(number) for number in re.findall(r"([\d.]+) images/s", text)]
        total += np.median(rates[1:] or rates)
    return total


def in_turn(rounds, contenders):
    """{name: [a figure of each round]} of the contenders that a part returns."""
    figures = {name: [] for name in contenders}
    for number in range(rounds):
        for name, (measure, *_) in contenders.items():
            figures[name].append(measure())
            print(f"round {number + 1}  {name}: {figures[name][-1]:,.3f}", file=sys.stderr)
    return figures


def seconds(words, **environment):
    """What a command prints, and how long it takes."""
    began = time.perf_counter()
    return finish([launch(words, **environment)]), time.perf_counter() - began


def heading(args, part):
    """What is measured on which processor, with the versions and the number of rounds."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        cpu = "".join(re.findall(r"model name\s*: (.*)", info.read_text())[:1]) or cpu
    where = f"CPU: {cpu}, {os.cpu_count()} cores"
    if args.device == "cuda" and part in ("throughput", "accuracy"):
        where = f"GPU: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {where}"
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    digits = f"{args.images:,} images of {args.sets[0].name}, {args.batch_size} per step and"
    return f"**{part}** - {where}; {versions}; {digits} process; n = {args.rounds}"


def shown(values, digits):
    """Median, lowest and highest as text."""
    return (f"{value:,.{digits}f}" for value in np.quantile(values, (0.5, 0, 1)))


def report(unit, figures, contenders):
    """A Markdown table of the figures, and a line for each pair that is compared."""
    lines = [f"| contender | {unit}, median | lowest–highest |", "| --- | ---: | ---: |"]
    for name, values in figures.items():
        middle, low, high = shown(values, 0 if min(values) >= 100 else 1 if min(values) >= 1 else 3)
        lines.append(f"| {name} | {middle} | {low}–{high} |")
    lines.append("")
    for name, (_, *against) in contenders.items():
        for other in against:  # paired by round
            middle, low, high = shown(np.divide(figures[name], figures[other]), 2)
            lines.append(f"- {name} / {other}: {middle} ({low}–{high})")
    return "\n".join(lines)


# Each part returns the unit and {name: [function that gives a figure, *compared with these]}.


def throughput(args):
    epochs = 4 if args.device == "cuda" else 1  # a GPU needs time to warm up

    def reference(name):
        return rate(finish([launch(loop(args, name, epochs, args.batch_size))]))

    def script(path, processes=0, copies=1):
        options = ["--device", args.device, "--epochs", epochs]
        jobs = []
        for number in range(copies):
            own_gpu = {"CUDA_VISIBLE_DEVICES": str(number)} if copies > 1 else {}
            jobs.append(launch(command(args, path, *options, processes=processes), **own_gpu))
        return rate(finish(jobs))

    contenders = {
        "bare loop": [partial(reference, "bare")],
        "conventional loop": [partial(reference, "conventional")],
        SINGLE: [partial(script, SINGLE), "bare loop", "conventional loop"],
        PARALLEL: [partial(script, PARALLEL), SINGLE],
    }
    powers = {2**power for power in range(10) if 2**power <= args.processes}
    for count in sorted(powers | {args.processes}):
        against, copies = [SINGLE], f"{SINGLE}, {count} copies"
        if count > 1:
            contenders[copies] = [partial(script, SINGLE, copies=count), SINGLE]
            against.append(copies)
        for path in (DDP, *args.also):
            name = f"{path}, processes: {count}"
            contenders[name] = [partial(script, path, count), *against]
            against = [*against, name]
    return "images/s", contenders


def accuracy(args):
    def seconds_to_it(words):
        texts, total = seconds(words, OMP_NUM_THREADS=str(os.cpu_count()))
        if float(re.findall(r"accuracy (\S+) %", texts[0])[-1]) < WANTED:
            raise harness.Problem(f"below {WANTED} %: {words}")
        return total

    def ours():
        return command(args, SINGLE, "--device", args.device, "--epochs", 3, "--log-interval", 50)

    return f"seconds to {WANTED} %", {
        SINGLE: [lambda: seconds_to_it(ours())],
        "textbook": [lambda: seconds_to_it(loop(args, "textbook", 14, 64)), SINGLE],
    }


def start(args):
    def above(script, processes):
        texts, total = seconds(command(args, script, processes=processes))
        return total - args.images / rate(texts)

    return "seconds", {
        "import torch": [lambda: seconds([sys.executable, "-c", "import torch"])[1]],
        SINGLE: [partial(above, SINGLE, 0), "import torch"],
        f"{DDP}, processes: 2": [partial(above, DDP, 2), "import torch"],
    }


def memory(args):
    def peak(commands, pick):
        """MB that the process pick(job) has written itself (libraries are shared), at most."""
        jobs, seen = [launch(words) for words in commands], [0]

        def watch(job):
            try:
                text = Path(f"/proc/{pick(job)}/smaps_rollup").read_text()
            except (OSError, IndexError):
                return  # not started yet, or ended
            seen.extend(int(kb) / 1024 for kb in re.findall(r"\nPrivate_Dirty: +(\d+)", text))

        finish(jobs, watch)
        return max(seen)

    def worker(launcher):
        """The process of local rank 1."""
        return Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[1]

    def above():  # import torch in two processes, which share the pages of libraries as workers do
        imports = [[sys.executable, "-c", "import time, torch; time.sleep(2)"]] * 2
        training = command(args, DDP, "--log-interval", 50, processes=2)
        return peak([training], worker) - peak(imports, lambda job: job.pid)

    return "MB", {f"a process of {DDP} above import torch": [above]}


def growth(args):
    def epoch(script, images, *options, processes=0):
        return images / rate(finish([launch(command(args, script, *options, processes=processes))]))

    contenders, first = {}, []
    for part in (4, 2, 1):
        images = args.images // part
        folder = write_mnist(f"{args.folder}-{part}", args.sets, images)
        name = f"{images:,} images"
        contenders[name] = [partial(epoch, SINGLE, images, "--data-dir", folder), *first]
        first = first or [name]
    first = []
    for count in (1, 2, 4):
        options = [args.images, "--batch-size", max(1, args.batch_size // count)]
        name = f"the same global batch, processes: {count}"
        contenders[name] = [partial(epoch, DDP, *options, processes=count), *first]
        first = first or [name]
    return "seconds of an epoch", contenders


PARTS = {part.__name__: part for part in (throughput, accuracy, start, memory, growth)}


def main():
    args = parse_args()
    args.sets = load_datasets(data_dir=args.data_dir)
    most = 16000 if args.quick else None
    args.images = len(args.sets[0].tensors[1][:most])
    if args.images < args.batch_size * max(args.processes, 4):
        raise harness.Problem(f"{args.images} images are too few for --batch-size and --processes")
    possible = {"accuracy": args.sets[0].name == "mnist", "memory": sys.platform == "linux"}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # which tidies up
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch  # the launcher leaves folders there
        args.folder = write_mnist(f"{scratch}/data", args.sets, most=most)
        for part in args.only:
            print(f"\n{heading(args, part)}\n", flush=True)
            if possible.get(part, True):
                unit, contenders = PARTS[part](args)
                print(report(unit, in_turn(args.rounds, contenders), contenders))
            else:
                print("- not measured: accuracy needs MNIST, memory Linux")


if __name__ == "__main__":
    try:
        main()
    except (harness.Problem, OSError, KeyboardInterrupt) as error:
        sys.exit(f"error: {str(error) or 'stopped'}")
