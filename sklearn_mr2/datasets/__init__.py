"""Bundled embeddings with a known class disparity, and readers for the user's own."""

from .embeddings import load_embeddings
from .fashion_mnist import load_fashion_mnist_features

__all__ = ["load_embeddings", "load_fashion_mnist_features"]
