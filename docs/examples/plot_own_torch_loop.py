"""
The loss in a torch loop of your own
====================================

The losses are plain torch modules that know nothing of scikit-learn.
:class:`~sklearn_mr2.mr2.losses.MR2Loss` keeps the running statistics of each class, makes the
margins from them, and adds the representation term. A training loop that you already have changes
in three places, marked below.
"""

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from sklearn_mr2.metrics import per_class_report
from sklearn_mr2.mr2.heads import LinearHead
from sklearn_mr2.mr2.losses import MR2Loss

X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(
    torch.tensor(X / 16, dtype=torch.float32),
    torch.tensor(y),
    train_size=600,
    stratify=y,
    random_state=0,
)

# %%
# The loop
# --------
#
# 1. The network gives features and logits, since the statistics are those of the features.
# 2. The criterion is made with the number of classes and of features.
# 3. It is called with logits, features and labels.

generator = torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
head = LinearHead(32, n_classes=10, generator=generator)  # 1: backbone and head apart
criterion = MR2Loss(10, 32, representation_weight=0.01, tau="auto")  # 2
optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=2e-3)

margins, losses = [], []
for _ in range(60):
    total = 0.0
    for rows in torch.randperm(len(X_train)).split(60):
        features = backbone(X_train[rows])
        loss = criterion(head(features), features, y_train[rows])  # 3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    losses.append(total / len(X_train))
    margins.append(criterion.margins.clone())

# %%
# Prediction uses the raw logits: margins belong to training. ``eval()`` keeps the statistics as
# they are, as it does for batch normalisation.

backbone.eval(), criterion.eval()
with torch.no_grad():
    predicted = head(backbone(X_test)).argmax(1)
per_class_report(y_test, predicted).round(3)

# %%
# Margins while the features are learned
# --------------------------------------
#
# They start from the spread of random features and follow what the network makes of each class.
# Their mean stays at ``margin``, here 1.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
left.semilogy(range(1, 61), losses, color="black")
left.set(xlabel="Epoch", ylabel="Training loss")
curves = torch.stack(margins).numpy()
colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, 10).numpy())
for digit in range(10):
    right.plot(range(1, 61), curves[:, digit], color=colors[digit])
# Names at the right end, moved apart where the curves end close together.
heights = curves[-1].copy()
order = heights.argsort()
gap = 0.05 * (curves.max() - curves.min())
for lower, upper in pairwise(order):
    heights[upper] = max(heights[upper], heights[lower] + gap)
for digit in range(10):
    right.text(61, heights[digit], str(digit), color=colors[digit], va="center", fontsize=9)
right.set(xlabel="Epoch", ylabel="Margin of the class (digit)", xlim=(1, 64))
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)

# %%
# The statistics are buffers: they are saved with the ``state_dict`` and move with ``.to(device)``.

print(list(criterion.state_dict()))
