"""
The path of mirror flow
=======================

Potentials differ in where their flow ends, and that shows along the way: in the loss, in the margin
and in the number of neurons that do the work. This example draws the path of three potentials, the
neurons at its end, and what the networks still know when neurons are removed.
"""

# %%
# Three potentials, one network
# -----------------------------
#
# Odd or even: 200 handwritten digits to train on, the others to test, and a hidden layer of 40
# neurons. The training follows the flow with all data in each step. ``tol=0`` goes on until the
# margin is 20, so that all three end at comparable losses.

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from sklearn_mr2 import MirrorFlowClassifier
from sklearn_mr2.display import (
    MirrorTrajectoryDisplay,
    NeuronSpectrumDisplay,
    PruningCurveDisplay,
)
from sklearn_mr2.mirror import Euclidean, HyperbolicEntropy, SmoothedPower

X, digit = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, digit % 2, train_size=200, random_state=0)

potentials = {
    "SmoothedPower(p=3)": SmoothedPower(p=3, lam=0.01),
    "Euclidean": Euclidean(),
    "HyperbolicEntropy(lam=0.01)": HyperbolicEntropy(lam=0.01),
}
models = {
    name: MirrorFlowClassifier(
        (40,),
        potential=potential,
        step_size=0.1,
        target_margin=20,
        tol=0,
        max_epochs=5000,
        random_state=0,
    ).fit(X, y)
    for name, potential in potentials.items()
}

# %%
# On the way
# ----------
#
# The flow's time grows without bound, and everything of interest happens in its logarithm. Read the
# panels from top to bottom:
#
# - The loss falls about as fast as the time grows, whatever the potential: its logarithm is close
#   to a line of slope -1.
# - The Q-margin is the smallest margin in units of the potential. It rises from where all samples
#   are classified correctly, quickly at first; the small dents are the smallest margin changing
#   hands between samples in steps of finite size. Its values belong to the potential, so each curve
#   is relative to its own last value.
# - The sparsity is 1 minus the share of neurons that take part. This is where the potentials part:
#   the power potential spreads the work over the neurons, and the hyperbolic entropy concentrates
#   it.

MirrorTrajectoryDisplay.from_estimator(models)
plt.show()

# %%
# At the end
# ----------
#
# A neuron's effective weight is the norm of its incoming weights times that of its outgoing ones.
# Sorted, and on a logarithmic axis, the weights of the power potential lie on a plateau, and those
# of the hyperbolic entropy fall off by orders of magnitude.

NeuronSpectrumDisplay.from_estimator(models)
plt.show()

# %%
# What the small ones are good for
# --------------------------------
#
# Small weights could still matter together. Remove them, the smallest first, and score what is left
# on data that were not trained on: the farther to the left a curve stays level, the fewer neurons
# the network needs. A tenth of them is enough for the hyperbolic entropy, half for the power
# potential.
#
# Sparse does not mean better. Which features the labels depend on decides that, and here, where
# digits are told apart by many of them, the denser networks are the more accurate.

PruningCurveDisplay.from_estimator(models, X_test, y_test)
plt.show()

# %%
# A curve that stays level promises a smaller network, and ``compact`` makes it.

sparse = models["HyperbolicEntropy(lam=0.01)"]
small = sparse.compact(threshold=0.01)
print(f"{sparse.hidden_layer_sizes[0]} neurons: accuracy {sparse.score(X_test, y_test):.3f}")
print(f"{small.hidden_layer_sizes[0]} neurons: accuracy {small.score(X_test, y_test):.3f}")
