"""Did the weights move, by how much, and where: distances between two tensors and between two sets of weights.

Elementwise metrics compare values in pairs. The Wasserstein distance compares the two sets of values as distributions,
blind to where in the tensor a value sits. All of it is computed in float64 from the exact values; the formulas stand in
`fa_study.distance.metrics`. Torch tensors (any device, with or without gradients), NumPy arrays and lists are taken
alike.
"""

from fa_study.distance.aggregate import weight_distances
from fa_study.distance.histogram import ValueHistogram
from fa_study.distance.metrics import METRICS
from fa_study.distance.pairs import max_difference, tensor_distance, value_quantiles, wasserstein_distance

__all__ = [
    "METRICS",
    "ValueHistogram",
    "max_difference",
    "tensor_distance",
    "value_quantiles",
    "wasserstein_distance",
    "weight_distances",
]
