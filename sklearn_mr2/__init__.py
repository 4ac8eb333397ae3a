"""Margins from feature spread (MR2) and mirror flow as scikit-learn estimators on torch."""

from ._version import __version__

__all__ = ["__version__"]
