"""Train the CNN of model.py on the digits of data.py: the baseline, on one GPU or the CPU.

python single_gpu_train.py
python single_gpu_train.py --output-dir runs/mine --resume  # starts runs/mine, or continues it
"""

import os
import random
import time

import numpy as np
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

import harness
from data import as_batch, load_datasets
from model import Net


def parse_args(argv=None):
    parser = harness.ArgumentParser(description=__doc__)
    option, count, real = parser.add_argument, harness.above(0, int), harness.above(0, float)
    option("--epochs", type=count, default=3, help="passes over the training images (%(default)s)")
    option("--batch-size", type=count, default=64, help="images per step (%(default)s)")
    option("--lr", type=real, default=0.05, help="peak of the one-cycle rate (%(default)s)")
    option("--seed", type=harness.above(-1, int), default=42, help="random seed (%(default)s)")
    auto = "auto: MNIST if it is there or can be downloaded, else synthetic digits"
    option("--dataset", choices=["auto", "mnist", "synthetic"], default="auto", help=auto)
    option("--data-dir", type=os.path.expanduser, default="data", help="folder of the data sets")
    option("--output-dir", type=os.path.expanduser, help="of the results (a new folder in runs)")
    option("--resume", action="store_true", help="continue from the checkpoint in --output-dir")
    option("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="(%(default)s)")
    option("--log-interval", type=count, default=50, help="steps between log lines (%(default)s)")
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
    net.eval()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = net(images)
        totals[0] += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
    net.train()
    return totals.tolist()


@harness.cleanup
def main(argv=None):
    args = parse_args(argv)
    device = harness.pick_device(args.device)
    train_set, test_set = load_datasets(args.dataset, args.data_dir)

    # For one process this is a shuffle by seed and epoch, the order in which DDP deals out images.
    sampler = DistributedSampler(train_set, 1, 0, seed=args.seed, drop_last=True)
    pinned = device.type == "cuda"  # only from pinned memory can a copy overlap with computing
    common = {"pin_memory": pinned, "collate_fn": as_batch}  # single samples need no collate_fn
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **common)
    test_loader = DataLoader(test_set, 128, **common)
    steps = len(train_loader)

    set_seed(args.seed)
    net = Net().to(device, memory_format=torch.channels_last)
    model = net
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
        set_seed(args.seed + epoch)  # so that --resume draws the same dropout and augmentation
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
                loss = torch.stack(losses).mean()
                log.train(epoch, step, loss.item(), scheduler, len(losses), began)
                losses, began = [], time.perf_counter()

        loss, correct, count = evaluate(net, test_loader, device)
        log.test(epoch, loss / count, correct, count)
        weights = {name: value.cpu().contiguous() for name, value in net.state_dict().items()}
        harness.save(folder, weights, optimizer, epoch + 1, args.epochs, options)


if __name__ == "__main__":
    harness.start(main)
