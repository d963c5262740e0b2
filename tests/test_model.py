"""Net: the shapes it takes and gives, and its three kinds of loss."""

import pytest
import torch

from model import Net


@pytest.mark.parametrize(
    "shape", [(28, 28), (1, 28, 28), (2, 28, 28), (4, 1, 28, 27), (2, 3, 28, 28), (1, 784)]
)
def test_inputs_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(N, 1, 28, 28\)"):
        Net()(torch.zeros(shape))


def test_logits_and_losses():
    net, inputs, labels = Net(), torch.randn(5, 1, 28, 28), torch.tensor([1, 2, 3, 4, 5])
    logits, mean, losses = net(inputs), net(inputs, labels), net(inputs, labels, "none")
    assert logits.shape == (5, 10) and logits.min() < 0
    assert mean.dim() == 0 and losses.shape == (5,)
    expected = -torch.log_softmax(logits, 1)[range(5), labels]
    assert torch.allclose(losses, expected, atol=1e-6)
    assert torch.allclose(mean, expected.mean(), atol=1e-6)
