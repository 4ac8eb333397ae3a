"""The convolutional network of the benchmarks."""

from torch import nn


class ConvNet(nn.Sequential):
    """Two convolutions and a dense layer: images (n, 1, 28, 28) to features (n, 64).

    Without `batch_norm` nothing holds the scale of the features, and they grow in training.
    """

    n_features = 64

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, self.n_features),
            *([nn.BatchNorm1d(self.n_features)] if batch_norm else []),
            nn.ReLU(),
        )
