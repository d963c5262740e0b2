"""Train the CNN of model.py on the digits of data.py with DistributedDataParallel.

    python -m torch.distributed.launch --nproc_per_node=2 ddp_train.py  # one process per GPU
    torchrun --nproc_per_node=2 ddp_train.py --output-dir runs/mine --resume
"""
import argparse
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from data import fetch, load_datasets, make_loader
from model import (Net, check_loss, find_world, get_device, load, on_rank_0, open_together,
                   open_writer, save, stop)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    option = parser.add_argument
    option("--epochs", type=int, default=3, help="passes over the training images")
    option("--batch-size", type=int, default=64, help="images per step, under DDP of each process")
    option("--lr", type=float, default=0.1, help="peak of the one-cycle learning rate")
    option("--seed", type=int, default=42, help="of the first weights and the order of the images")
    option("--dataset", choices=["auto", "mnist", "synthetic"], default="auto",
           help="auto: MNIST where it is or can be downloaded, else digits drawn here")
    option("--data-dir", default="data", help="folder of the data sets")
    option("--output-dir", help="folder of the results (default: %(default)s, a new one in runs)")
    option("--resume", action="store_true", help="go on from the checkpoint in --output-dir")
    option("--device", choices=["auto", "cpu", "cuda"], default="auto", help="to train on")
    option("--log-interval", type=int, default=50, help="steps from one log line to the next")
    option("--local_rank", "--local-rank", type=int, default=-1, help="set by the launcher")
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        parser.error = stop  # local rank 0 alone says what is wrong with the options
    args = parser.parse_args()
    for name, low, high in (("epochs", 1, 10**6), ("batch_size", 1, 10**6), ("lr", 1e-9, 1e3),
                            ("seed", 0, 2**31), ("log_interval", 1, 10**9)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name.replace('_', '-')} must be from {low} to {high}")
    if args.resume and not args.output_dir:
        parser.error("--resume needs the --output-dir to go on in")
    return args


def set_seed(seed):
    """Seed all generators of random numbers: Python's, numpy's, PyTorch's on the CPU and GPUs."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def evaluate(model, loader, device):
    """Sum of the losses, number of right answers and of images over the whole test set."""
    totals = torch.zeros(3, device=device)
    for pair in loader:
        images, labels = (part.to(device, non_blocking=True) for part in pair)
        logits = model(images)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        totals += torch.stack([loss, (logits.argmax(1) == labels).sum(), (labels >= 0).sum()])
    dist.all_reduce(totals)  # sums over all ranks, each of which saw its share of the images
    return totals.tolist()


@record
def main():
    args = parse_args()
    local_rank = max(int(os.environ.get("LOCAL_RANK", args.local_rank)), 0)
    device = get_device(args.device, local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, **find_world())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sys.stdout = open(os.devnull, "w") if rank > 0 else sys.stdout  # printing is for global rank 0
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    if local_rank > 0:
        dist.barrier(patient)  # here the others wait, while local rank 0 fetches the data ...
    problem = fetch(args.dataset, args.data_dir, download=local_rank == 0)
    if local_rank == 0:
        dist.barrier(patient)  # ... and here it joins them, so that nobody waits twice
    train_set, test_set = load_datasets(args.dataset, args.data_dir, problem)
    # Every rank shuffles alike, then takes every world_size-th image, beginning with its rank-th.
    sampler = torch.utils.data.DistributedSampler(train_set, world_size, rank, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, sampler, device)
    test_loader = make_loader(test_set, 128, range(rank, len(test_set), world_size), device)
    set_seed(args.seed)
    net = Net().to(device, memory_format=torch.channels_last)
    model = torch.nn.parallel.DistributedDataParallel(net)
    set_seed(args.seed + rank)  # equal weights, but dropout and augmentation must differ by rank
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    batch, total, steps = args.batch_size * world_size, len(train_set), len(train_loader)
    options = {"dataset": train_set.dataset, "images": total, "lr": args.lr, "seed": args.seed}
    folder, checkpoint = open_together(args, __file__, options, net)
    start = load(checkpoint, net, optimizer)
    if start >= args.epochs:
        dist.destroy_process_group()
        return print(f"{folder} is finished: {start} of {args.epochs} epochs are done")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * steps, last_epoch=start * steps - 1)
    writer = open_writer(folder, start * total + 1, rank)
    print(f"{Path(__file__).name}: device {device}, backend {backend}, world size {world_size}, "
          f"{train_set.dataset} ({total} + {len(test_set)} images), lr {args.lr}, "
          f"global batch {batch} = {args.batch_size} x {world_size}", flush=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        losses, seen, began = [], epoch * total, time.perf_counter()
        for step, pair in enumerate(train_loader, 1):
            images, labels = (part.to(device, non_blocking=True) for part in pair)
            count = min(batch, total - (step - 1) * batch)  # images in this step, of all ranks
            mine = len(range(rank, count, world_size))  # of this rank; more is only filling
            loss = model(images[:mine or 1], labels[:mine or 1]) * (mine * world_size / count)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
            if step % args.log_interval and step < steps:
                continue
            losses = torch.stack(losses) / world_size
            dist.all_reduce(losses)
            losses = losses.tolist()  # waits for the GPU, only once per log line
            check_loss(losses, epoch + 1, step - len(losses) + 1)
            loss, before = sum(losses) / len(losses), seen
            seen = epoch * total + min(step * batch, total)
            rate = (seen - before) / (time.perf_counter() - began)
            print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps} loss {loss:.4f} {rate:.0f} "
                  f"images/s {(args.epochs * total - seen) / rate:.0f} s left", flush=True)
            writer.add_scalar("train/loss", loss, seen)
            writer.add_scalar("train/lr", scheduler.get_last_lr()[0], seen)
            writer.add_scalar("train/images_per_second", rate, seen)
            losses, began = [], time.perf_counter()

        loss, right, count = evaluate(net, test_loader, device)
        check_loss([loss], epoch + 1, steps)
        print(f"epoch {epoch + 1}/{args.epochs} {train_set.dataset}: test loss {loss / count:.4f}"
              f"  accuracy {100 * right / count:.2f} % ({right:.0f}/{count:.0f})", flush=True)
        writer.add_scalar("test/loss", loss / count, seen)
        writer.add_scalar("test/accuracy", right / count, seen)
        writer.flush()
        weights = {name: value.cpu() for name, value in net.state_dict().items()}
        on_rank_0(save, weights, folder / "model.pth")
        state = dict(model=weights, optimizer=optimizer.state_dict(), options=options,
                     epoch=epoch + 1, step=(epoch + 1) * steps, schedule=seen / total / args.epochs)
        on_rank_0(save, state, folder / "checkpoint.pth")
    print(f"the model is in {folder / 'model.pth'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the run at once, without a traceback
    main()
