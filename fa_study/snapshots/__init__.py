"""Open any checkpoint as a lazy mapping from plain parameter names to tensors."""

from fa_study.snapshots.weights import Weights, load_weights, snapshot_steps

__all__ = ["Weights", "load_weights", "snapshot_steps"]
