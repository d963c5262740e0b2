"""Run a script with a fault in it: FAULT="RANK PLACE KIND" python faulty.py SCRIPT [OPTION ...]

RANK fails ("any": each rank), in PLACE: data (before the first epoch), step, evaluate or save (in
the second epoch). KIND: error, exit0, kill, nan, sleep. Else the script runs as if started itself.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import data
import harness
import model

rank, place, kind = os.environ["FAULT"].split()
script = next(word for word in sys.argv[1:] if word.endswith(".py"))
sys.argv.remove(script)  # a launcher puts its --local-rank before it
this_rank = os.environ.get("RANK", "0")
epoch = 0


def patch(owner, name, wrapper):
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(real, *args, **kwargs))


def fail(at, in_epoch=1):
    if at != place or epoch != in_epoch:
        return
    if kind == "error":
        raise RuntimeError(f"the fault of the test in {place}")
    if kind == "exit0":
        os._exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        os.write(2, f"sleeping in {place}\n".encode())  # at once: lines of two ranks do not mix
        time.sleep(60)


def set_epoch(real, sampler, number):
    global epoch
    if number == 2 and rank != "0":
        fail("save")  # the next epoch, while rank 0 saves
    epoch = number
    return real(sampler, number)


def load_datasets(real, *args):
    fail("data", in_epoch=0)
    return real(*args)


def forward(real, net, inputs, labels=None, reduction="mean"):
    fail("evaluate" if labels is None else "step")
    outputs = real(net, inputs, labels, reduction)
    broken = kind == "nan" and place == "step" and labels is not None and epoch == 1
    return outputs * float("nan") if broken else outputs


def replace(real, *args, **kwargs):
    fail("save")  # in the last act of saving
    return real(*args, **kwargs)


# A worker that torchrun has restarted is sound.
if rank in ("any", this_rank) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    patch(torch.utils.data.DistributedSampler, "set_epoch", set_epoch)
    patch(data, "load_datasets", load_datasets)
    patch(model.Net, "forward", forward)
    if this_rank == "0":
        patch(harness.os, "replace", replace)
runpy.run_path(script, run_name="__main__")
