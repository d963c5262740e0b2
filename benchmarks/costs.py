"""What a training costs besides its steps, each as a ratio of two things measured in turn.

    python benchmarks/costs.py --data-dir data                    # all of it, about half an hour
    python benchmarks/costs.py --data-dir data --only start memory

- start: the whole command for one epoch, less its training, against the same scripts with all
  imports at their top.
- memory: private memory of a DDP process at its peak, against one that has only imported torch.
- growth: an epoch of 1, 2 and 4 times the data; of 1, 2 and 4 processes with one global batch.
- accuracy: from the start of the command to the end of the first epoch with 99 % or more on the
  test images, against a recipe common in tutorials (two 3 x 3 convolutions of 32 and 64
  channels, dropout, Adadelta, images one by one through PIL), also to its first such epoch.

MNIST is needed, as synthetic digits are not what 99 % is about.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from throughput import DDP, SINGLE, free_port, machine  # noqa: E402

from data import FILES, MEAN, STD, load_datasets, read_folder  # noqa: E402

WANTED = 99.0  # percent


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--rounds", type=int, default=5, help="times that each runs (default: 5)")
    option("--data-dir", default="data", help="folder of MNIST (default: data)")
    option("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    option("--textbook", action="store_true", help=argparse.SUPPRESS)  # a contender's run
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def command(script, args, scratch, *options, processes=0):
    """The command of one epoch of a script, on the CPU, that logs once."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    launcher.append(f"--master_port={free_port()}")
    common = ["--data-dir", args.data_dir, "--dataset", "mnist", "--device", "cpu"]
    output = ["--output-dir", tempfile.mkdtemp(dir=scratch), "--log-interval", "1000000"]
    start = [sys.executable, *(launcher if processes else []), str(script)]
    return [str(part) for part in (*start, *common, *output, "--epochs", 1, *options)]


def run(words, watch=None):
    """Run it with one thread a process; returns (output, seconds)."""
    began = time.perf_counter()
    job = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if watch:
        threading.Thread(target=watch, args=(job,)).start()
    try:
        out, errors = job.communicate()
    finally:
        job.terminate()  # where it still runs, after a signal
    if job.returncode:
        raise SystemExit(f"error: {' '.join(words)} failed:\n{out}{errors}")
    return out, time.perf_counter() - began


def epoch_seconds(out, images):
    """How long the training steps took, by the one log line."""
    return images / float(re.findall(r"([\d.]+) images/s", out)[-1])


def in_turn(args, contenders):
    """{name: [figures]} of functions without arguments that return a figure, called in turn."""
    figures = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, measure in contenders.items():
            figures[name].append(measure())
            last = figures[name][-1]
            print(f"round {number + 1}/{args.rounds}  {name}: {last:.1f}", file=sys.stderr)
    return figures


def spread(values, digits=1):
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def ratio(figures, one, other):
    """Median and spread of one over the other, paired by round."""
    return spread([a / b for a, b in zip(figures[one], figures[other])], 2)


def start(args, scratch):
    eager = Path(scratch, "eager")
    eager.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, eager)
    early = "import torchvision\nimport torch.utils.tensorboard\n\nimport os\n"
    for script in (SINGLE, DDP):
        text = (eager / script).read_text("utf-8")
        (eager / script).write_text(text.replace("import os\n", early, 1), "utf-8")

    def above(folder, script, processes):
        out, seconds = run(command(folder / script, args, scratch, processes=processes))
        return seconds - epoch_seconds(out, args.images)

    for script, processes in ((SINGLE, 0), (DDP, 2)):
        contenders = {
            "as it is": partial(above, ROOT, script, processes),
            "all imports first": partial(above, eager, script, processes),
        }
        figures = in_turn(args, contenders)
        print(
            f"- {script}{' on 2 processes' * bool(processes)}, start to exit less training: "
            f"{spread(figures['as it is'])} s, with all imports first "
            f"{spread(figures['all imports first'])} s, "
            f"ratio {ratio(figures, 'as it is', 'all imports first')}"
        )


def private_memory(pid):
    """MB that this process alone has written, or 0 when it has ended (Linux).

    Pages of files (the libraries) do not count: the processes of a machine share them.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(re.search(r"^Private_Dirty: +(\d+) kB", text, re.M)[1]) / 1024


def memory(args, scratch):
    if not Path("/proc/self/smaps_rollup").exists():
        print("- not measured: memory, which needs Linux")
        return

    def peak():
        """Of the worker with local rank 1, looked at ten times a second."""
        seen = [0]

        def watch(job):
            while job.poll() is None:
                found = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
                for pid in found[1:2]:
                    seen.append(private_memory(pid))
                time.sleep(0.1)

        usual = ["--log-interval", 50]
        run(command(ROOT / DDP, args, scratch, *usual, processes=2), watch)
        return max(seen)

    def imported():
        """Of one of two processes, which share the pages of the libraries as two workers do."""
        code = "import torch; print(flush=True); input()"
        words = [sys.executable, "-c", code]
        jobs = [
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "12"
        ]
        for job in jobs:
            job.stdout.readline()
        found = private_memory(jobs[1].pid)
        for job in jobs:
            job.communicate(b"\n")
        return found

    figures = in_turn(args, {"ddp": peak, "import torch": imported})
    above = [a - b for a, b in zip(figures["ddp"], figures["import torch"])]
    print(
        f"- private memory of a DDP process at its peak: {spread(figures['ddp'], 0)} MB, "
        f"{spread(above, 0)} MB above import torch"
    )


def growth(args, scratch):
    def repeated(times):
        folder = Path(scratch, f"data{times}")
        raw = folder / "MNIST" / "raw"
        raw.mkdir(parents=True)
        (images, labels), test = read_folder(Path(args.data_dir, "MNIST", "raw"))
        arrays = (images.repeat(times, 0), labels.repeat(times, 0), *test)
        for name, array in zip(FILES, arrays):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (raw / name).write_bytes(head + array.tobytes())
        return folder

    def epoch(script, times, *options, processes=0):
        def measure():
            words = command(script, args, scratch, *options, processes=processes)
            return epoch_seconds(run(words)[0], times * args.images)

        return measure

    folders = {times: repeated(times) for times in (1, 2, 4)}
    sizes = {
        f"{times} x the data": epoch(ROOT / SINGLE, times, "--data-dir", folder)
        for times, folder in folders.items()
    }
    figures = in_turn(args, sizes)
    for name in list(sizes)[1:]:
        print(f"- an epoch of {name} takes {ratio(figures, name, '1 x the data')} of the time")
    worlds = {
        f"{count} processes": epoch(ROOT / DDP, 1, "--batch-size", 64 // count, processes=count)
        for count in (1, 2, 4)
    }
    figures = in_turn(args, worlds)
    for name in list(worlds)[1:]:
        print(
            f"- an epoch of {name} on {os.cpu_count()} cores, global batch 64, takes "
            f"{ratio(figures, name, '1 processes')} of the time of one"
        )


class Textbook(torch.nn.Module):
    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, images):
        return self.layers(images)


def textbook(data_dir):
    """The recipe of the tutorials, until an epoch ends with the wanted accuracy (14 at most)."""
    from torchvision import datasets, transforms

    torch.manual_seed(1)
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    loaders = []
    for train, size in ((True, 64), (False, 1000)):
        digits = datasets.MNIST(data_dir, train=train, transform=steps)
        loaders.append(torch.utils.data.DataLoader(digits, batch_size=size, shuffle=train))
    net = Textbook()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(14):
        net.train()
        for step, (images, labels) in enumerate(loaders[0]):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch + 1} step {step} loss {loss.item():.4f}")
        net.eval()
        with torch.no_grad():
            correct = sum((net(images).argmax(1) == labels).sum() for images, labels in loaders[1])
        accuracy = 100 * correct.item() / len(loaders[1].dataset)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2f} %", flush=True)
        if accuracy >= WANTED:
            return
        scheduler.step()


def accuracy(args, scratch):
    def until(words):
        """Seconds to the first line with the wanted accuracy; all threads that torch takes."""
        began = time.perf_counter()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
            for line in job.stdout:
                found = re.search(r"accuracy (\d+\.\d+) %", line)
                if found and float(found[1]) >= WANTED:
                    seconds = time.perf_counter() - began
                    job.kill()
                    return seconds
        raise SystemExit(f"error: {' '.join(words)} ended below {WANTED} %")

    usual = ["--epochs", 3, "--log-interval", 50]
    own = [sys.executable, __file__, "--textbook", "--data-dir", args.data_dir]
    contenders = {
        "here": lambda: until(command(ROOT / SINGLE, args, scratch, *usual)),
        "textbook": lambda: until(own),
    }
    figures = in_turn(args, contenders)
    print(
        f"- {WANTED:.0f} % accuracy: {SINGLE} after {spread(figures['here'])} s, the textbook "
        f"recipe after {spread(figures['textbook'])} s, {ratio(figures, 'textbook', 'here')} times "
        f"as long"
    )


PARTS = {"start": start, "memory": memory, "growth": growth, "accuracy": accuracy}


def main():
    args = parse_args()
    args.data_dir = str(Path(args.data_dir).resolve())
    if args.textbook:
        return textbook(args.data_dir)
    try:
        args.images = len(load_datasets("mnist", args.data_dir)[0])  # once, before anything
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}; see --data-dir") from None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # which tidies up
    print(f"{machine()}; n = {args.rounds}\n", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch  # the launcher leaves a folder there in each run
        for name in args.only:
            PARTS[name](args, scratch)


if __name__ == "__main__":
    main()
