"""What the scripts are compared with: three loops, each of which runs in a process of its own.

- bare: the network and the batches of the scripts, the data ready as floats, nothing else.
- conventional: torchvision's MNIST with ToTensor and Normalize in a plain DataLoader.
- textbook: a recipe common in tutorials (two 3 x 3 convolutions of 32 and 64 channels, dropout,
  Adadelta, images one by one through PIL), until WANTED of the test images are right.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from data import MEAN, STD, load_datasets
from model import Net

WANTED = 99.0  # percent


def train(batches, epochs, device, memory_format):
    """Train with the scripts' optimizer; prints the images per second of each epoch.

    batches: a function that returns an iterable of (float images, int64 labels).
    """
    net = Net().to(device, memory_format=memory_format)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for _ in range(epochs):
        count, began = 0, time.perf_counter()
        for images, labels in batches():
            loss = net(images.to(device), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += len(labels)
        loss.item()  # waits for the GPU
        print(f"{count / (time.perf_counter() - began):.1f} images/s", flush=True)


def bare(data_dir, device, epochs, batch_size):
    images, labels = load_datasets("mnist", data_dir)[0][slice(None)]
    images, labels = images.to(device), labels.to(device)
    complete = len(labels) // batch_size * batch_size

    def batches():
        order = torch.randperm(len(labels), device=device)[:complete]
        return ((images[part], labels[part]) for part in order.split(batch_size))

    train(batches, epochs, device, torch.channels_last)


def usual_loader(data_dir, train, batch_size):
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    digits = datasets.MNIST(data_dir, train=train, transform=steps)
    return DataLoader(digits, batch_size, shuffle=train, drop_last=train)


def conventional(data_dir, device, epochs, batch_size):
    loader = usual_loader(data_dir, True, batch_size)
    train(lambda: loader, epochs, device, torch.contiguous_format)


def textbook(data_dir, device, epochs, batch_size):
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    hidden = [nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()]
    net = nn.Sequential(*convolutions, *hidden, nn.Dropout(0.5), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = usual_loader(data_dir, True, batch_size)
    test_loader = usual_loader(data_dir, False, 1000)
    for epoch in range(epochs):
        for step, (images, labels) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                loss.item()  # as printed by the tutorials
        net.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (net(images.to(device)).argmax(1).cpu() == labels).sum().item()
        net.train()
        accuracy = 100 * correct / len(test_loader.dataset)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2f} %", flush=True)
        if accuracy >= WANTED:
            break
        scheduler.step()
