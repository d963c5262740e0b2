"""The network, and what the three scripts do around the training of it: device, files, stopping."""
import atexit
import ctypes
import math
import os
import socket
import sys
import tempfile
import time
import zipfile
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LOCKED = {}  # {folder: descriptor}, see lock_folder


class Net(nn.Module):
    """A small CNN for 28 x 28 digits: two convolutions, each with a pool, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(16, 48, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(48 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, inputs, labels=None):
        """Logits, or with labels the loss.

        inputs: float tensor (N, 1, 28, 28); labels: int64 tensor (N,) of classes 0..9, or None.
        Returns raw logits (N, 10) without labels, else the mean cross-entropy as a 0-dim tensor:
        under nn.DataParallel each GPU then computes the loss of its own part of the batch.
        Raises ValueError for inputs of another shape.
        """
        if inputs.dim() != 4 or inputs.shape[1:] != (1, 28, 28):
            raise ValueError(f"Net takes inputs (N, 1, 28, 28), not {tuple(inputs.shape)}")
        x = F.relu(F.max_pool2d(self.conv1(inputs), 2))  # as relu before the pool, at a quarter of
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # its cost: the two can be swapped
        logits = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits if labels is None else F.cross_entropy(logits, labels)


def get_device(name, local_rank=None):
    """The torch.device for "auto" (a GPU if there is one), "cpu", "cuda" or "mps".

    With a local rank (DDP) it is the GPU of that number, and where a node has fewer GPUs than
    processes "auto" falls back to the CPU and says so. stop()s where there is no such GPU.
    """
    rank, gpus, mps = local_rank or 0, torch.cuda.device_count(), torch.backends.mps.is_available()
    processes = 1 if local_rank is None else int(os.environ.get("LOCAL_WORLD_SIZE", rank + 1))
    shortage = f"{processes} processes on this node but {gpus} GPUs: start one process a GPU"
    if name == "auto":
        name = "cuda" if gpus >= processes else "mps" if mps and local_rank is None else "cpu"
        if name == "cpu" and gpus and rank == 0:
            print(f"warning: training on the CPU: {shortage}", flush=True)
    if name == "cuda" and gpus < processes:
        stop(f"--device cuda: {shortage}, or use --device cpu")
    if name == "mps" and not mps:
        stop("--device mps: PyTorch sees no such GPU, use --device cpu")
    if name == "cuda":
        torch.cuda.set_device(rank)
    elif sys.platform == "linux":
        # glibc would give the memory of each step back to the system and take it anew in the next.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**30)
    return torch.device(name, rank) if name == "cuda" else torch.device(name)


def find_world():
    """What to tell dist.init_process_group beside the backend: nothing if a launcher set it all.

    Without a launcher this process is a world of its own, which needs neither address nor port.
    stop()s where the environment is set by half or wrong, which would end in waiting for others.
    """
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    rank, size, host, port = (os.environ.get(name) for name in names)
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces and not set(interfaces.split(",")) <= {name for _, name in socket.if_nameindex()}:
        stop(f"GLOO_SOCKET_IFNAME={interfaces} is no network interface of this machine: unset it")
    if rank is None and size is None:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        if not (0 <= int(rank) < int(size) and host and 0 < int(port) < 2**16):
            raise ValueError("no rank below the world size, no host or no port")
        socket.getaddrinfo(host, None)
    except (TypeError, ValueError, OSError) as error:
        found = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)
        stop(f"{found}: {error}; set these and LOCAL_RANK in each process, or start with torchrun")
    if int(rank) == 0 and size != os.environ.get("LOCAL_WORLD_SIZE"):
        print(f"waiting at {host}:{port} until all {size} processes are there", flush=True)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0":
        return {}
    # A launcher with a fixed port keeps its store, and in it the addresses of the dead workers.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"restart {restart}", store)
    return {"store": store, "rank": rank, "world_size": size}


def stop(problem):
    """End the run with one line for the user, and exit code 1. All ranks call this together.

    Global rank 0 says it (local rank 0, before there is a group). The others give it time to, as
    a launcher kills all processes as soon as one has left with an error.
    """
    launched = "LOCAL_WORLD_SIZE" in os.environ  # by a launcher, with the same options
    if in_group() and dist.get_world_size() > 1:
        atexit.register(leave_at_once)
    if dist.get_rank() if in_group() else launched and int(os.environ.get("LOCAL_RANK", 0)):
        time.sleep(5)
        raise SystemExit(1)
    raise SystemExit(f"error: {problem}")


def leave_at_once():
    """End this process without closing its group, whose threads can make the end hang or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def in_group():
    """Whether this process is part of a process group."""
    return dist.is_available() and dist.is_initialized()


def check_loss(losses, epoch, first):
    """stop() at the first of these losses (floats, from this step on) that is NaN or infinite."""
    for step, loss in enumerate(losses, first):
        if not math.isfinite(loss):
            stop(f"the loss is {loss} in epoch {epoch} at step {step}: try a smaller --lr")


def save(state, path):
    """Save so that a crash at any moment leaves the old file whole.

    The new file is written beside it, forced to the disk and renamed, which is one step. stop()s
    where it cannot be written.
    """
    part = Path(f"{path}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by a RuntimeError
        part.unlink(missing_ok=True)
        stop(f"cannot save {path}, is there space on the disk? {error}")


def open_output(args, script, options, net):
    """Make the folder of a run ready; returns it (a Path) and the checkpoint to go on from or None.

    Without args.output_dir a new folder below runs/ is made, named by date, time and script. A
    checkpoint that is there is read only with args.resume; it must fit `net` and have been made
    with the same options (a dict). stop()s where the folder cannot be written, where an earlier
    model or checkpoint would be overwritten, or the checkpoint is damaged or of another training.
    """
    new = f"runs/{datetime.now():%Y%m%d-%H%M%S-%f}_{Path(script).stem}"
    path = Path(args.output_dir or new, "checkpoint.pth")
    advice = "use another --output-dir"
    try:
        path.parent.mkdir(parents=True, exist_ok=bool(args.output_dir))
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(bytes(2**16))
    except OSError as error:
        stop(f"cannot write to {path.parent}: {error}; see --output-dir")
    lock_folder(path.parent.resolve())
    if not path.exists():
        model = path.with_name("model.pth")
        if model.exists() and not args.resume:
            stop(f"{model} exists, but no checkpoint: {advice}, or start anew with --resume")
        if model.exists():
            os.replace(model, f"{model}.old")  # not ours to lose: its checkpoint may be elsewhere
        return path.parent, None
    if not args.resume:
        stop(f"{path} exists: go on from it with --resume, or {advice}")
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load does not look at the check sums
            raise ValueError("damaged")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        made, shapes = dict(checkpoint["options"]), shapes_of(checkpoint["model"])
        (group,), state = (checkpoint["optimizer"][key] for key in ("param_groups", "state"))
        momenta = [list(state[index]["momentum_buffer"].shape) for index in group["params"]]
        if not (type(checkpoint["epoch"]) is int and checkpoint["epoch"] > 0 and "max_lr" in group):
            raise ValueError("no epoch or no schedule")
        differing = [name for name, value in options.items() if made.get(name) != value]
    except Exception as error:  # whatever a damaged or foreign file can cause
        reason = type(error).__name__
        stop(f"{path} is cut off or no checkpoint ({reason}): move it away, or {advice}")
    fitting = momenta == [list(parameter.shape) for parameter in net.parameters()]
    if shapes != shapes_of(net.state_dict()) or not fitting:
        stop(f"{path} is of another model: {advice}")
    for name in differing:
        stop(f"{path} was made with {name} {made.get(name)}, not {options[name]}: {advice}")
    return path.parent, checkpoint


def lock_folder(folder):
    """stop() if another process trains into this folder; ours until this process ends, or dies."""
    try:
        import fcntl
        if folder not in LOCKED:
            LOCKED[folder] = os.open(folder, os.O_RDONLY)
            fcntl.flock(LOCKED[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(f"another run is writing to {folder}: use another --output-dir")
    except (ImportError, OSError):
        pass  # Windows and some network disks have no such lock


def open_together(args, script, options, net):
    """open_output() on rank 0, for all ranks; stop()s where they were given different options."""
    asked = dict(options, epochs=args.epochs, batch_size=args.batch_size)
    asked["log_interval"] = args.log_interval
    given = on_rank_0(dict, asked)
    problem = next((f"{name} is {asked[name]} on rank {dist.get_rank()}, but {value} on rank 0"
                    for name, value in given.items() if value != asked[name]), "")
    problem = first_problem(problem)
    if problem:
        stop(problem)
    return on_rank_0(open_output, args, script, options, net)


def shapes_of(state_dict):
    """{name: shape} of the tensors of a state dict."""
    return {name: value.shape for name, value in state_dict.items()}


def load(checkpoint, net, optimizer):
    """Put the state of a checkpoint into both; returns how many epochs it has seen (None: 0)."""
    if checkpoint is None:
        return 0
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"]


def on_rank_0(function, *args):
    """Call it on global rank 0 alone; every rank gets what it returned, or stops as it did.

    So all ranks take the same decision, whatever each of them would find on its own disk.
    """
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function(*args)
        except SystemExit as end:
            answer[1] = end.code.replace("error: ", "", 1)
    dist.broadcast_object_list(answer, src=0)
    dist.barrier()  # a group that ends right after it has sent Python objects can hang (torch 2.0)
    if answer[1]:
        stop(answer[1])
    return answer[0]


def first_problem(problem):
    """The first problem (a line, or "" for none) of any rank, on every rank."""
    problems = [problem]
    if in_group():
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, problem)
        dist.barrier()  # see on_rank_0
    return next(filter(None, problems), "")


def open_writer(folder, step, rank=0):
    """A TensorBoard SummaryWriter that begins at this step, or NoWriter for ranks other than 0.

    What a run that was killed has logged from this step on no longer shows.
    """
    if rank > 0:
        return NoWriter()
    from torch.utils.tensorboard import SummaryWriter  # a slow import: only where it is used
    return SummaryWriter(folder, purge_step=step)


class NoWriter:
    """Stands in for the SummaryWriter on the ranks that write nothing."""

    def add_scalar(self, tag, value, step):
        pass

    def flush(self):
        pass
