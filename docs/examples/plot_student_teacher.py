"""
How many neurons a network uses
===============================

The labels come from a network of three neurons, the student has thirty. All potentials train it to
separate the data, and to a large margin; how many of its neurons take part is up to the potential.
"""

# %%
# A teacher of three neurons
# --------------------------
#
# Sixty samples with five features, and the sign of three ReLU neurons' sum as label.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from sklearn_mr2 import MirrorFlowClassifier
from sklearn_mr2.mirror import Euclidean, HyperbolicEntropy, SmoothedPower

rng = np.random.default_rng(3)
X = rng.normal(size=(60, 5))
teacher = rng.normal(size=(3, 5))
y = np.maximum(X @ teacher.T, 0) @ [1, -1, 1] > 0
print(f"{y.mean():.0%} are positive")

# %%
# Four students
# -------------
#
# They differ in nothing but the potential. ``tol=0`` goes on until the margin is 100, whether or
# not the direction still moves. A larger step suits the power potential, whose flow is slow to
# follow.

potentials = {
    "SmoothedPower(p=3)": SmoothedPower(p=3, lam=0.01),
    "Euclidean": Euclidean(),
    "HyperbolicEntropy(lam=10)": HyperbolicEntropy(lam=10),
    "HyperbolicEntropy(lam=0.1)": HyperbolicEntropy(lam=0.1),
}
students = {
    name: MirrorFlowClassifier(
        (30,),
        potential=potential,
        fit_intercept=False,
        init_scale=0.3,
        step_size=0.3,
        target_margin=100,
        tol=0,
        max_epochs=10_000,
        random_state=0,
    ).fit(X, y)
    for name, potential in potentials.items()
}

# %%
# Effective weights
# -----------------
#
# :func:`~sklearn_mr2.mirror.theory.effective_weights` measures what a neuron contributes: the norm
# of its incoming weights times that of its outgoing ones. Each bar is a neuron, the largest first.

fig, axes = plt.subplots(1, 4, figsize=(10, 3), sharey=True, layout="constrained")
rows = {}
for ax, (name, student) in zip(axes, students.items(), strict=True):
    w_in, w_out = student.coefs_
    c = np.sort(np.linalg.norm(w_in, axis=0) * np.abs(w_out[:, 0]))[::-1]
    ax.bar(range(len(c)), c / c[0], width=0.8, color="#0072B2")
    ax.set_title(name, fontsize=10)
    ax.set_xlabel("Neuron")
    ax.spines[["top", "right"]].set_visible(False)
    theta = np.concatenate([w_in.ravel(), w_out.ravel()])
    rows[name] = {
        "active neurons": (c > 0.01 * c[0]).sum(),
        "participation ratio": c.sum() ** 2 / (c**2).sum(),
        # The network is homogeneous of degree 2, so a margin grows with the square of the norm.
        **{f"L{p} margin": student.margin_ / np.linalg.norm(theta, p) ** 2 for p in (1, 2, 3)},
    }
axes[0].set_ylabel("Effective weight / largest")
plt.show()

# %%
# The hyperbolic entropy looks for the largest margin relative to the :math:`L_1` norm of the
# weights, which takes few neurons; the power potential looks for that in :math:`L_3`, and uses them
# all. With a large ``lam`` the entropy behaves like the Euclidean potential until the weights have
# outgrown ``lam``.

pd.DataFrame(rows).T.style.format("{:.3g}")

# %%
# On the way
# ----------
#
# ``history_`` records the sparsity of the hidden layer, which is 1 minus the participation ratio's
# share of all neurons. The neurons are not chosen at once: the choice sharpens while the margin
# grows.

fig, ax = plt.subplots(figsize=(9, 3.5), layout="constrained")
for (name, student), color in zip(
    students.items(), ["#0072B2", "#E69F00", "#009E73", "#000000"], strict=True
):
    path = student.history_.query("margin > 0.1").dropna(subset="sparsity")
    ax.plot(path["margin"], path["sparsity"], label=name, color=color)
ax.set(xscale="log", xlabel="Smallest margin", ylabel="Sparsity", ylim=(0, 1))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %%
# A smaller network that says the same
# ------------------------------------
#
# Neurons that contribute next to nothing can go.

sparse = students["HyperbolicEntropy(lam=0.1)"]
small = sparse.compact(threshold=0.01)
print(f"{sparse.hidden_layer_sizes[0]} neurons, {small.hidden_layer_sizes[0]} are enough")
print(f"{(small.predict(X) == sparse.predict(X)).mean():.0%} of the predictions are the same")
