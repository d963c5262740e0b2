"""The network that the three scripts train."""

import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """A small CNN for 28 x 28 digits: two convolutions, each with a pool, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(16, 48, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(48 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, inputs, labels=None, reduction="mean"):
        """Logits, or with labels the loss: under nn.DataParallel each GPU then computes its own.

        inputs: float tensor (N, 1, 28, 28); labels: int64 tensor (N,) of classes 0..9, or None.
        Returns logits (N, 10); with labels their cross-entropy: the mean, a 0-dim tensor, or with
        reduction="none" one loss per image (N,). Raises ValueError for inputs of another shape.
        """
        if inputs.dim() != 4 or inputs.shape[1:] != (1, 28, 28):
            raise ValueError(f"Net takes inputs (N, 1, 28, 28), not {tuple(inputs.shape)}")
        # Pool first, then relu: the two can be swapped, and relu then costs a quarter.
        x = F.relu(F.max_pool2d(self.conv1(inputs), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits = self.fc2(F.relu(self.fc1(x.flatten(1))))
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels, reduction=reduction)
