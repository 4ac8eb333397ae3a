"""The main job: cross-entropy and MR2 probes of the same embeddings, compared class by class."""

from .errors import InputError
from .job import RULES, Outcome, Settings, n_fits, run_probe

__all__ = ["RULES", "InputError", "Outcome", "Settings", "n_fits", "run_probe"]
