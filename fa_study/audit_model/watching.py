"""The attention layers of a model, and what stands around each of their calls."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn
from torch.utils import _pytree as pytree

# around(key, forward, bound arguments) gives the layer's result; the key is the layer's name, and which call it is.
Around = Callable[[str, Callable, inspect.BoundArguments], object]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer of every module whose class is named ...Attention, the innermost where they are nested.

    Raises
    ------
    ValueError
        If the model has none.
    """
    found = {name: m for name, m in model.named_modules() if "Attention" in type(m).__name__}
    layers = {n: m for n, m in found.items() if not any(other.startswith(f"{n}.") for other in found)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layers: no module of a class named ...Attention")
    return layers


@contextlib.contextmanager
def watching(layers: Mapping[str, nn.Module], around: Around) -> Iterator[None]:
    """While open, `around` is called instead of every layer's `forward`, and may call that."""
    calls: Counter[str] = Counter()

    def watched(name: str, forward: Callable) -> Callable:
        signature = inspect.signature(forward)

        def call(*args, **kwargs):
            calls[name] += 1
            key = name if calls[name] == 1 else f"{name} (call {calls[name]})"
            return around(key, forward, signature.bind(*args, **kwargs))

        return call

    before = {name: vars(layer).get("forward") for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.forward = watched(name, layer.forward)
    try:
        yield
    finally:
        for name, layer in layers.items():
            del layer.forward
            if before[name] is not None:
                layer.forward = before[name]


def float_tensors(tree: object) -> dict[str, Tensor]:
    """Path -> float tensor of nested arguments, without masks and biases: those have a form of each implementation."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    named = ((pytree.keystr(path), leaf) for path, leaf in leaves)
    return {
        path: leaf
        for path, leaf in named
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and "mask" not in path and "bias" not in path
    }


def outputs_of(result: object, library: str) -> list[Tensor]:
    """The float tensors that an attention layer computed; transformers' second is its weights, if it has them."""
    tensors = [result] if isinstance(result, Tensor) else [x for x in result if isinstance(x, Tensor)]
    return tensors[:1] if library == "transformers" else tensors
