"""What surrounds a training: options, device, process group, files, log, errors. Skip it."""

import argparse
import builtins
import ctypes
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
import zipfile
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

LONGEST_WAIT = timedelta(hours=1)  # of one rank for another, which may be downloading
TASKS = "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

at_the_end = ExitStack()  # closes what main() has opened: lock, curves, process group
world = {"rank": 0, "size": 1, "store": None, "objects": None}  # see join_group


class Problem(Exception):
    """What the user can mend, in one line."""


def start(main):
    """Call main() and end the process, with exit code 0, or 1 and a line about what went wrong."""
    if hasattr(builtins, "__IPYTHON__"):
        return main()  # a notebook shows errors itself, and its kernel must live on
    code, text, failure, hook = 1, "", None, threading.excepthook
    # TensorBoard raises again here what its thread has met, such as a full disk: once is enough.
    threading.excepthook = lambda thread: isinstance(thread.exc_value, OSError) or hook(thread)
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that the encoding lacks
        if torch.__version__ < "2.3" and numpy.__version__ >= "2":  # pip lets both be together
            raise Problem(f"PyTorch {torch.__version__} is for numpy 1: pip install 'numpy<2'")
        main()
        code = 0
    except BrokenPipeError:
        pass  # `| head` has seen enough
    except KeyboardInterrupt:
        text = "stopped: --resume continues after the last complete epoch"
    except (Problem, OSError) as error:
        text = f"error: {error}"
    except Exception as error:
        text, failure = traceback.format_exc(), error
    if text:  # not above: Python 3.8 can loop in an except block, where an error is its own context
        tell(text, failure)
    with suppress(OSError):
        sys.stdout.flush()
    if code or world["store"]:
        # All is written. Python's own end aborts or hangs now and then in threads of gloo, which
        # run on after destroy_process_group().
        os._exit(code)


def cleanup(main):
    """Decorator of main(argv=None): at its end, also by an error, what it opened is closed."""

    @functools.wraps(main)
    def closing(argv=None):
        with at_the_end:
            return main(argv)

    return closing


def tell(text, error=None):
    """Print to stderr unless another rank has done so, and let the launcher report the error.

    The others wait until it has told, as a launcher ends all ranks as soon as one has left.
    """
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if world["store"] is None and launched:
            find_store()  # the launcher's, which does not wait for the ranks
        if world["store"] and world["store"].add("problems", 1) > 1:
            return world["store"].wait(["told"], timedelta(seconds=10))
    except Exception:  # the host of the store has left: without a launcher, rank 0
        if world["rank"] > 0 and not launched:
            text = f"rank {world['rank']} ends because rank 0 has ended: see what that one said"
    if error and "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # the report takes its traceback from what is being handled
        except type(error):
            get_error_handler().record_exception(error)
    print(text, file=sys.stderr, flush=True)
    with suppress(Exception):
        world["store"].set("told", "yes")


class ArgumentParser(argparse.ArgumentParser):
    """Shows the script's docstring as it is, and raises Problem for wrong options."""

    def __init__(self, description):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=raw)

    def error(self, message):
        raise Problem(f"{message} (see --help)")


def above(lowest, kind):
    """The type of an option: a finite number of this kind (int or float) above `lowest`."""

    def number(text):
        if not lowest < kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"must be above {lowest}")
        return kind(text)

    return number


def pick_device(name, local_rank=None):
    """The torch.device for "auto" (a GPU if there is one), "cpu", "cuda" or "mps".

    With a local rank (DDP) it is the GPU of that number; "auto" takes the CPU where a node has
    fewer GPUs than processes, and says so. Raises Problem where "cuda" or "mps" is not possible.
    """
    number, gpus, processes = local_rank or 0, torch.cuda.device_count(), 1
    if local_rank is not None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or number + 1)
    if gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        number, processes = 0, 1  # a scheduler can show each process a GPU of its own
    shortage = f"{processes} processes on this node but {gpus} GPUs: start one process per GPU"
    mps = local_rank is None and torch.backends.mps.is_available()
    if name == "mps" and not mps:
        reason = "PyTorch sees none here" if local_rank is None else "DDP has no backend for it"
        raise Problem(f"--device mps: {reason}: use --device cpu")
    if name == "auto":
        name = "cuda" if gpus >= processes else "mps" if mps else "cpu"
        if 0 < gpus < processes and number == 0:
            print(f"warning: training on the CPU: {shortage}", flush=True)
    if name == "cuda":
        if gpus < processes:
            reason = shortage if gpus else "PyTorch sees no GPU here"
            raise Problem(f"--device cuda: {reason}, or use --device cpu")
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if sys.platform == "linux":
        # glibc would return the memory of each step to the system and take it again in the next.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        if mallopt(M_MMAP_THRESHOLD, 2**25):  # the largest one that it accepts
            mallopt(M_TRIM_THRESHOLD, 2**30)
    return torch.device(name)


def join_group(backend):
    """dist.init_process_group(backend) in the world that the launcher describes, or in one of one.

    Raises Problem where the ranks do not find each other or use different backends, and where
    MPI or SLURM started several tasks that do not know of each other.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's does not end this waiting
    at_the_end.callback(signal.signal, signal.SIGINT, handler)
    world.update(rank=0, size=1, store=dist.HashStore())
    tasks = [int(os.environ.get(name) or 1) for name in TASKS]
    tasks = max(*tasks, int(os.environ.get("PMIX_RANK") or 0) + 1)  # PMIx tells no number of tasks
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        find_store()
    elif tasks > 1:
        names = "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        problem = f"{tasks} tasks were started, but RANK is not set"
        raise Problem(f"{problem}: start one torchrun per node, or set {names}")
    rank, size, store = world["rank"], world["size"], world["store"]
    store.set(f"backend of rank {rank}", backend)
    for other in range(size):
        theirs = store.get(f"backend of rank {other}").decode()
        if theirs != backend:
            different = f"rank {rank} uses {backend}, rank {other} {theirs}"
            raise Problem(f"{different}: the same kind of --device is needed on all")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)
    at_the_end.push(leave_group)
    # Both are kept: to release a group of gloo, when its peers have left, can hang (PyTorch 2.0).
    world.update(all=dist.group.WORLD, objects=dist.new_group(backend="gloo", timeout=LONGEST_WAIT))
    signal.signal(signal.SIGINT, handler)


def find_store():
    """Wait for the store where the ranks meet, and put it into `world`. May raise Problem."""
    if not os.environ.get("LOCAL_WORLD_SIZE"):  # without a launcher, which is there already
        where = [os.environ.get(name, "(not set)") for name in ("MASTER_ADDR", "MASTER_PORT")]
        print("waiting for the other ranks at", *where, file=sys.stderr, flush=True)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=LONGEST_WAIT))
    except (ValueError, RuntimeError) as error:
        raise Problem(f"cannot join the other ranks: {error}") from None
    # Under an old prefix a restarted rank would find the addresses of its dead predecessors.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world.update(store=dist.PrefixStore(f"restart {restart}", store), rank=rank, size=size)


def leave_group(error, *_):
    """Destroy the process group, except after an error that leaves other ranks behind."""
    if dist.is_initialized() and (error is None or world["size"] == 1):
        dist.destroy_process_group()


def of_rank_0(value):
    """The value that rank 0 has given, on every rank."""
    values = [value]
    if world["size"] > 1:
        dist.broadcast_object_list(values, group=world["objects"])
        dist.barrier(world["objects"])  # a group that ends right after it sent objects can hang
    return values[0]


def open_folder(args, script, options, steps):
    """(folder of the run as a Path, checkpoint to resume or None), as rank 0 finds them.

    Without args.output_dir it is a new one below runs/, named by date, time and script. Raises
    Problem where a model would be overwritten, the checkpoint is damaged or was made with other
    `options` (a dict), a rank has other options than rank 0, or an epoch has no `steps`.
    """
    if args.resume and not args.output_dir:
        raise Problem("--resume needs the --output-dir of the run to resume")
    same = dict(options, epochs=args.epochs, batch_size=args.batch_size, resume=args.resume)
    for name, value in of_rank_0(same).items():
        if same[name] != value:
            raise Problem(f"{name} is {same[name]} on rank {world['rank']}, but {value} on rank 0")
    if steps == 0:
        few = f"{options['images']} training images are less than one global batch"
        raise Problem(f"{few} of {args.batch_size * world['size']}: use a smaller --batch-size")
    new = of_rank_0(f"runs/{datetime.now():%Y%m%d-%H%M%S-%f}_{Path(script).stem}")
    folder, checkpoint = Path(args.output_dir or new), None
    path = folder / "checkpoint.pth"
    if world["rank"] == 0:
        lock(folder)
        checkpoint = read_checkpoint(path, args, options)
    checkpoint = of_rank_0(checkpoint)
    if checkpoint is None and path.exists():
        print(f"warning: rank 0 lacks {path}, which is here, and starts at epoch 1", flush=True)
    return folder, checkpoint


def lock(folder):
    """Make the folder; Problem where another run writes there."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        at_the_end.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Problem(f"another run is writing to {folder}: use another --output-dir") from None
    except (ImportError, OSError):
        pass  # Windows and some network disks have no such lock


def read_checkpoint(path, args, options):
    """The checkpoint to resume or None; Problem where something would be lost or does not fit."""
    model = path.with_name("model.pth")
    there = path if path.exists() else model
    if there.exists() and not args.resume:
        raise Problem(f"{there} exists: continue it with --resume, or use another --output-dir")
    if not path.exists():
        if model.exists():
            os.replace(model, f"{model}.old")  # not ours to lose: its checkpoint may be elsewhere
        return None
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load does not look at the check sums
            raise ValueError("wrong check sum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        made, epoch, epochs = (checkpoint[name] for name in ("options", "epoch", "epochs"))
    except Exception as error:  # whatever a damaged or foreign file can cause
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise Problem(f"cannot read {path} ({reason}): use another --output-dir") from None
    for name, value in options.items():
        if made.get(name) != value:
            made_with = f"{path} was made with {name} {made.get(name)}, not {value}"
            raise Problem(f"{made_with}: use the same, or another --output-dir")
    if epoch >= args.epochs:
        print(f"{path.parent} is finished: {epoch} of {args.epochs} epochs are done", flush=True)
    elif epochs != args.epochs:
        where = f"continues where a run of {args.epochs} epochs has it after epoch {epoch}"
        print(f"--epochs was {epochs} and is {args.epochs}: the learning rate {where}", flush=True)
    return checkpoint


def load(checkpoint, net, optimizer):
    """Put a checkpoint into both; returns how many epochs it has seen. May raise Problem."""
    if checkpoint is None:
        return 0
    try:
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Problem(f"the checkpoint is of another network or optimizer: {reason}") from None
    return checkpoint["epoch"]


def save(folder, weights, optimizer, epoch, epochs, options):
    """Write model.pth (the weights) and checkpoint.pth after this epoch. May raise Problem."""
    moments = tree_map_only(torch.Tensor, lambda value: value.cpu(), optimizer.state_dict())
    state = dict(model=weights, optimizer=moments, epoch=epoch, epochs=epochs, options=options)
    save_file(weights, folder / "model.pth")
    save_file(state, folder / "checkpoint.pth")
    if epoch == epochs:
        print(f"the model is in {folder / 'model.pth'}", flush=True)


def save_file(state, path):
    """torch.save, but a crash at any moment leaves the old file complete. May raise Problem.

    The new file is written next to it, forced to the disk and renamed, which is one step.
    """
    part = Path(f"{path}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # for a full disk torch.save raises RuntimeError
        with suppress(OSError):
            part.unlink()
        raise Problem(f"cannot save {path}, is there space on the disk? {error}") from None


class Log:
    """The printed lines, and TensorBoard's curves over the number of training images seen.

    Only rank 0 calls train() and test(). Both raise Problem for a loss that is NaN or infinite.
    """

    def __init__(self, script, folder, start, args, device, train_set, test_set, steps):
        size, self.name, self.images = world["size"], train_set.name, len(train_set)
        self.epochs, self.steps, self.batch = args.epochs, steps, args.batch_size * size
        if world["rank"] == 0:
            backend = dist.get_backend() if dist.is_initialized() else "none"
            first = f"{Path(script).name}: device {device}, backend {backend}, world size {size}"
            digits = f"{self.name} ({self.images} + {len(test_set)} images), lr {args.lr}"
            batch = f"global batch {self.batch} = {args.batch_size} x {size}"
            print(f"{first}, {digits}, {batch}\nthe results go to {folder}", flush=True)
            self.writer = open_writer(folder, start * self.images + 1)

    def train(self, epoch, step, loss, scheduler, steps, began):
        """The mean loss of the last `steps` steps, which began at this time.perf_counter()."""
        rate = steps * self.batch / (time.perf_counter() - began)
        left = ((self.epochs - epoch) * self.steps - step) * self.batch / rate
        line = f"step {step}/{self.steps} loss {loss:.4f} {rate:.0f} images/s {left:.0f} s left"
        seen, lr = epoch * self.images + step * self.batch, scheduler.get_last_lr()[0]
        self.write("train", epoch, seen, line, loss=loss, lr=lr, images_per_second=rate)

    def test(self, epoch, loss, correct, count):
        """The mean loss and the number of correct predictions of `count` images."""
        percent, counts = f"{100 * correct / count:.2f} %", f"{correct:.0f}/{count:.0f}"
        line = f"{self.name}: test loss {loss:.4f}  accuracy {percent} ({counts})"
        seen = (epoch + 1) * self.images
        self.write("test", epoch, seen, line, loss=loss, accuracy=correct / count)

    def write(self, part, epoch, seen, line, **curves):
        """Print the line and add the values to the curves."""
        if not math.isfinite(curves["loss"]):
            raise Problem(f"the loss is {curves['loss']} in epoch {epoch + 1}: try a smaller --lr")
        print(f"epoch {epoch + 1}/{self.epochs} {line}", flush=True)
        if self.writer:
            for name, value in curves.items():
                self.writer.add_scalar(f"{part}/{name}", value, seen)
            self.writer.flush()


def open_writer(folder, first):
    """A SummaryWriter, or None where there is no TensorBoard.

    What a run that was killed has logged from the step `first` on no longer shows.
    """
    resumed = any(folder.glob("events.out.tfevents.*"))
    try:
        from torch.utils.tensorboard import SummaryWriter  # slow, and may be missing

        writer = SummaryWriter(folder, purge_step=first if resumed else None)
    except Exception as error:  # whatever an import can raise
        return print(f"warning: no curves, as TensorBoard cannot be used: {error!r}", flush=True)
    at_the_end.callback(writer.close)
    return writer
