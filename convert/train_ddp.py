"""Train a ResNet-18 on a folder of pictures, with one process per GPU; train.py converted.

python -m torch.distributed.launch --nproc_per_node=2 train_ddp.py --data-dir pictures
torchrun --nproc_per_node=2 train_ddp.py --data-dir pictures
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models, transforms


def parse_args():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--data-dir", required=True, help="folder with train/ and val/")
    option("--output-dir", help="default: a new folder in runs/")
    option("--epochs", type=int, default=10, help="default: %(default)s")
    option("--batch-size", type=int, default=64, help="images per step and process (%(default)s)")
    option("--lr", type=float, default=0.001, help="highest learning rate (%(default)s)")
    option("--image-size", type=int, default=224, help="in pixels (%(default)s)")
    option("--workers", type=int, default=2, help="processes that load images (%(default)s)")
    option("--seed", type=int, default=42, help="default: %(default)s")
    option("--local_rank", "--local-rank", type=int, default=0, help="by the launcher")
    return parser.parse_args()


@torch.no_grad()
def evaluate(net, loader, device):
    """Return the mean loss and the accuracy over the complete validation set."""
    net.eval()
    for buffer in net.buffers():  # each rank has its own BatchNorm statistics; rank 0's count
        dist.broadcast(buffer, src=0)
    totals = torch.zeros(3, device=device)  # sum of the losses, correct predictions, images
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = net(images)
        totals[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    net.train()
    dist.all_reduce(totals)  # each rank saw its share of the images
    loss, correct, count = totals.tolist()
    return loss / count, correct / count


def save(net, path):
    """Save the weights; a crash meanwhile leaves an earlier file as it was."""
    weights = {name: value.cpu().contiguous() for name, value in net.state_dict().items()}
    torch.save(weights, path + ".part")
    os.replace(path + ".part", path)


def main():
    args = parse_args()
    local_rank = int(os.environ.get("LOCAL_RANK") or args.local_rank)
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:  # the launcher set it
        dist.init_process_group(backend)
    else:  # no launcher: a group of this process alone
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = (args.image_size, args.image_size)
    crop, flip = transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()
    augment = transforms.Compose([crop, flip, transforms.ToTensor()])
    plain = transforms.Compose([transforms.Resize(size), transforms.ToTensor()])
    train_set = datasets.ImageFolder(os.path.join(args.data_dir, "train"), augment)
    val_set = datasets.ImageFolder(os.path.join(args.data_dir, "val"), plain)
    assert train_set.classes == val_set.classes, "train/ and val/ need the same classes"
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # it shuffles
    pinned = device.type == "cuda"
    loading = dict(batch_size=args.batch_size, num_workers=args.workers, pin_memory=pinned)
    loading["multiprocessing_context"] = "spawn" if args.workers else None  # not fork: NCCL
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    val_loader = DataLoader(val_set, sampler=range(rank, len(val_set), world_size), **loading)

    torch.manual_seed(args.seed)
    net = models.resnet18(num_classes=len(train_set.classes)).to(device)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    writer = SummaryWriter(args.output_dir) if rank == 0 else None
    best = -1.0

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank)  # augmentation differs by rank
        train_loss = torch.zeros((), device=device)
        for images, labels in train_loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.detach()  # a tensor: .item() here would wait for the GPU each step
        scheduler.step()
        dist.all_reduce(train_loss)
        train_loss = train_loss.item() / len(train_loader) / world_size
        val_loss, accuracy = evaluate(net, val_loader, device)
        if rank > 0:
            continue  # only rank 0 prints, logs and saves
        losses = f"train loss {train_loss:.4f}, val loss {val_loss:.4f}"
        print(f"epoch {epoch + 1}/{args.epochs}: {losses}, accuracy {accuracy:.2%}", flush=True)
        writer.add_scalar("loss/train", train_loss, epoch + 1)
        writer.add_scalar("loss/val", val_loss, epoch + 1)
        writer.add_scalar("accuracy/val", accuracy, epoch + 1)
        writer.flush()
        if accuracy > best:
            best = accuracy
            save(net, os.path.join(writer.log_dir, "best.pth"))
    dist.destroy_process_group()
    print(end="", flush=True)  # os._exit closes nothing: the writer and the files are flushed above
    os._exit(0)  # Python's own end can hang in gloo's threads (PyTorch 2.0)


if __name__ == "__main__":
    main()
