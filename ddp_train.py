"""Train the CNN of model.py on the digits of data.py with DistributedDataParallel.

python -m torch.distributed.launch --nproc_per_node=2 ddp_train.py  # one process per GPU
torchrun --nproc_per_node=2 ddp_train.py --output-dir runs/mine --resume
"""

import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

import harness
from data import as_batch, load_datasets
from model import Net


def parse_args(argv=None):
    parser = harness.ArgumentParser(description=__doc__)
    option, count, real = parser.add_argument, harness.above(0, int), harness.above(0, float)
    option("--epochs", type=count, default=3, help="passes over the training images (%(default)s)")
    option("--batch-size", type=count, default=64, help="images per step and process (%(default)s)")
    option("--lr", type=real, default=0.05, help="peak of the one-cycle rate (%(default)s)")
    option("--seed", type=harness.above(-1, int), default=42, help="random seed (%(default)s)")
    auto = "auto: MNIST if it is there or can be downloaded, else synthetic digits"
    option("--dataset", choices=["auto", "mnist", "synthetic"], default="auto", help=auto)
    option("--data-dir", type=os.path.expanduser, default="data", help="folder of the data sets")
    option("--output-dir", type=os.path.expanduser, help="of the results (a new folder in runs)")
    option("--resume", action="store_true", help="continue from the checkpoint in --output-dir")
    option("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="(%(default)s)")
    option("--log-interval", type=count, default=50, help="steps between log lines (%(default)s)")
    option("--local_rank", "--local-rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args(argv)


def set_seed(seed):
    """Seed all generators of random numbers: Python's, numpy's, PyTorch's on the CPU and GPUs."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def evaluate(net, loader, device):
    """Sum of the losses, number of correct predictions and number of images."""
    totals = torch.zeros(3, device=device)
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)  # those of BatchNorm differ; the saved ones are of rank 0
    net.eval()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = net(images)
        totals[0] += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
    net.train()
    dist.all_reduce(totals)  # the sums over all ranks, each of which saw its share of the images
    return totals.tolist()


@harness.cleanup
def main(argv=None):
    args = parse_args(argv)
    local_rank = int(os.environ.get("LOCAL_RANK") or args.local_rank)
    device = harness.pick_device(args.device, local_rank)
    harness.join_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    if local_rank > 0:
        dist.barrier()  # wait here, while local rank 0 downloads ...
    train_set, test_set = load_datasets(args.dataset, args.data_dir)
    if local_rank == 0:
        dist.barrier()  # ... and here it joins the others, so that nobody waits twice

    # Every rank shuffles alike and takes every world_size-th image, beginning with its rank-th.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    pinned = device.type == "cuda"  # only from pinned memory can a copy overlap with computing
    common = {"pin_memory": pinned, "collate_fn": as_batch}  # single samples need no collate_fn
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **common)
    share = range(rank, len(test_set), world_size)  # a DistributedSampler would repeat images
    test_loader = DataLoader(test_set, 128, sampler=share, **common)
    steps = len(train_loader)

    set_seed(args.seed)
    net = Net().to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(net)  # copies the weights of rank 0 to all ranks
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    options = dict(dataset=train_set.name, images=len(train_set), lr=args.lr, seed=args.seed)
    folder, checkpoint = harness.open_folder(args, __file__, options, steps)
    start = harness.load(checkpoint, net, optimizer)
    if start >= args.epochs:
        return  # nothing is left to do
    scheduler = OneCycleLR(optimizer, args.lr, args.epochs * steps, last_epoch=start * steps - 1)
    log = harness.Log(__file__, folder, start, args, device, train_set, test_set, steps)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        # Dropout and augmentation must differ by rank, and be the same again after --resume.
        set_seed(args.seed + epoch * world_size + rank)
        losses, began = [], time.perf_counter()
        for step, (images, labels) in enumerate(train_loader, 1):
            images = images.to(device, non_blocking=pinned)
            labels = labels.to(device, non_blocking=pinned)
            loss = model(images, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())  # no .item() here: it would wait for the GPU in each step
            if step % args.log_interval == 0 or step == steps:
                loss = torch.stack(losses).mean() / world_size
                dist.all_reduce(loss)  # the mean over all ranks
                if rank == 0:
                    log.train(epoch, step, loss.item(), scheduler, len(losses), began)
                losses, began = [], time.perf_counter()

        loss, correct, count = evaluate(net, test_loader, device)
        if rank == 0:
            log.test(epoch, loss / count, correct, count)
            weights = {name: value.cpu().contiguous() for name, value in net.state_dict().items()}
            harness.save(folder, weights, optimizer, epoch + 1, args.epochs, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    harness.start(main)
