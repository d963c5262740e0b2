"""Run scripts in processes that are forked from one that has imported PyTorch already.

A new interpreter needs 3 s for its imports, a launcher and two workers 6 s: most of a test.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Other systems cannot be forked with PyTorch in them: they pay for the imports.
CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.utils.tensorboard", "torchvision"])


def child(script, words, env, cwd, streams):
    """What the new process does."""
    multiprocessing.set_start_method(None, force=True)  # the usual one, for the loaders' workers
    os.setsid()
    if hasattr(signal, "alarm"):
        signal.alarm(600)  # nothing is left over where the tests are killed
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for descriptor, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    sys.argv = [script, *words]
    sys.path[:1] = [os.path.dirname(script), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    if env.get("DOUBLE"):
        import torch

        torch.set_default_dtype(torch.float64)
    runpy.run_path(script, run_name="__main__")


def run(script, ranks, cwd, timeout):
    """Run the script once for each (options, environment) in `ranks`.

    Returns [(output, errors), ...] and the exit codes. A process that fails ends the others after
    20 s. Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [[Path(folder, f"{kind}{rank}") for kind in "oe"] for rank in range(len(ranks))]
        jobs = []
        for (words, env), paths in zip(ranks, streams):
            arguments = str(script), [str(word) for word in words], env, str(cwd), paths
            jobs.append(CONTEXT.Process(target=child, args=arguments))
            jobs[-1].start()
        end = time.monotonic() + timeout
        while any(job.is_alive() for job in jobs) and time.monotonic() < end:
            if any(job.exitcode for job in jobs):
                end = min(end, time.monotonic() + 20)
            time.sleep(0.01)
        hung = [job for job in jobs if job.is_alive()]
        for job in hung:
            job.kill()
        for job in jobs:
            job.join()
        outputs = [tuple(path.read_text(errors="replace") for path in pair) for pair in streams]
    codes = [job.exitcode for job in jobs]
    if len(hung) == len(jobs):
        raise subprocess.TimeoutExpired([str(script), ranks[0][0]], timeout, outputs)
    return outputs, codes
