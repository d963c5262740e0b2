"""What the scripts are compared with: three loops, each of which runs as a process of its own.

    python benchmarks/loops.py bare --data-dir data --batch-size 64

- bare: the network and the batches of the scripts, the data ready as floats, nothing else.
- conventional: torchvision's MNIST with ToTensor and Normalize in a plain DataLoader.
- textbook: a recipe common in tutorials (two 3 x 3 convolutions of 32 and 64 channels, dropout,
  Adadelta, images one by one through PIL), until an epoch ends with 99 % on the test images.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from data import MEAN, STD, load_datasets  # noqa: E402
from model import Net  # noqa: E402

WANTED = 99.0  # percent of the test images


def train(args, batches, memory_format):
    """Train with the scripts' optimizer; prints the images per second of each epoch.

    batches: a function that returns an iterable of (float images, int64 labels).
    """
    net = Net().to(args.device, memory_format=memory_format)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for _ in range(args.epochs):
        count, began = 0, time.perf_counter()
        for images, labels in batches():
            loss = net(images.to(args.device), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += len(labels)
        loss.item()  # waits for the GPU
        print(f"{count / (time.perf_counter() - began):.1f} images/s", flush=True)


def bare(args):
    images, labels = load_datasets("mnist", args.data_dir)[0][slice(None)]
    images, labels = images.to(args.device), labels.to(args.device)
    complete = len(labels) // args.batch_size * args.batch_size

    def batches():
        order = torch.randperm(len(labels), device=args.device)[:complete]
        return ((images[part], labels[part]) for part in order.split(args.batch_size))

    train(args, batches, torch.channels_last)


def torchvision_set(args, train):
    from torchvision import datasets, transforms

    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    return datasets.MNIST(args.data_dir, train=train, transform=steps)


def conventional(args):
    digits = torchvision_set(args, train=True)
    loader = DataLoader(digits, batch_size=args.batch_size, shuffle=True, drop_last=True)
    train(args, lambda: loader, torch.contiguous_format)


def textbook(args):
    torch.manual_seed(1)
    train_loader = DataLoader(torchvision_set(args, train=True), batch_size=64, shuffle=True)
    test_loader = DataLoader(torchvision_set(args, train=False), batch_size=1000)
    net = nn.Sequential(
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
    ).to(args.device)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        for step, (images, labels) in enumerate(train_loader):
            optimizer.zero_grad()
            logits = net(images.to(args.device))
            loss = nn.functional.cross_entropy(logits, labels.to(args.device))
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                loss.item()  # as printed by the tutorials
        net.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                predictions = net(images.to(args.device)).argmax(1)
                correct += (predictions == labels.to(args.device)).sum().item()
        net.train()
        accuracy = 100 * correct / len(test_loader.dataset)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2f} %", flush=True)
        if accuracy >= WANTED:
            break
        scheduler.step()


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    loops = {"bare": bare, "conventional": conventional, "textbook": textbook}
    parser.add_argument("loop", choices=list(loops))
    parser.add_argument("--data-dir", default="data", help="folder of MNIST (default: data)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step (default: 64)")
    parser.add_argument("--epochs", type=int, default=1, help="at most (default: 1)")
    parser.add_argument("--device", default="cpu", help="to train on (default: cpu)")
    args = parser.parse_args()
    loops[args.loop](args)


if __name__ == "__main__":
    main()
