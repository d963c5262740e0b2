"""Train the CNN of model.py on the digits of data.py: DataParallel splits each batch over GPUs.

    python data_parallel_train.py
    python data_parallel_train.py --output-dir runs/mine --resume  # starts runs/mine, or goes on
"""
import argparse
import random
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from data import load_datasets, make_loader
from model import Net, check_loss, get_device, load, open_output, open_writer, save


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
    option("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="to train on")
    option("--log-interval", type=int, default=50, help="steps from one log line to the next")
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
    return totals.tolist()


def main():
    args = parse_args()
    device = get_device(args.device)
    train_set, test_set = load_datasets(args.dataset, args.data_dir)
    # For one replica this is a shuffle by seed and epoch: the order in which DDP deals out images.
    sampler = torch.utils.data.DistributedSampler(train_set, 1, 0, seed=args.seed)
    train_loader = make_loader(train_set, args.batch_size, sampler, device)
    test_loader = make_loader(test_set, 128, range(len(test_set)), device)
    set_seed(args.seed)
    net = Net().to(device, memory_format=torch.channels_last)
    model = net if args.device == "cpu" else torch.nn.DataParallel(net)  # takes all GPUs it sees
    warnings.filterwarnings("ignore", "Was asked to gather")  # the losses: one number per GPU
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    batch, total, steps = args.batch_size, len(train_set), len(train_loader)
    options = {"dataset": train_set.dataset, "images": total, "lr": args.lr, "seed": args.seed}
    folder, checkpoint = open_output(args, __file__, options, net)
    start = load(checkpoint, net, optimizer)
    if start >= args.epochs:
        return print(f"{folder} is finished: {start} of {args.epochs} epochs are done")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * steps, last_epoch=start * steps - 1)
    writer = open_writer(folder, start * total + 1)
    print(f"{Path(__file__).name}: device {device}, backend none, world size 1, "
          f"{train_set.dataset} ({total} + {len(test_set)} images), lr {args.lr}, "
          f"global batch {batch} = {args.batch_size} x 1", flush=True)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        losses, seen, began = [], epoch * total, time.perf_counter()
        for step, pair in enumerate(train_loader, 1):
            images, labels = (part.to(device, non_blocking=True) for part in pair)
            means = model(images, labels).view(-1)  # one of each GPU; parts can differ in size
            loss = sum(m * len(p) for m, p in zip(means, labels.chunk(len(means)))) / len(labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
            if step % args.log_interval and step < steps:
                continue
            losses = torch.stack(losses)
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

        loss, right, count = evaluate(model, test_loader, device)
        check_loss([loss], epoch + 1, steps)
        print(f"epoch {epoch + 1}/{args.epochs} {train_set.dataset}: test loss {loss / count:.4f}"
              f"  accuracy {100 * right / count:.2f} % ({right:.0f}/{count:.0f})", flush=True)
        writer.add_scalar("test/loss", loss / count, seen)
        writer.add_scalar("test/accuracy", right / count, seen)
        writer.flush()
        weights = {name: value.cpu() for name, value in net.state_dict().items()}
        save(weights, folder / "model.pth")
        state = dict(model=weights, optimizer=optimizer.state_dict(), options=options,
                     epoch=epoch + 1, step=(epoch + 1) * steps, schedule=seen / total / args.epochs)
        save(state, folder / "checkpoint.pth")
    print(f"the model is in {folder / 'model.pth'}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the run at once, without a traceback
    main()
