"""Gradients with rounding sites against float64 automatic differentiation, and attention inside a model."""

import math

import pytest
import torch

from fa_study.attention import attention_gradients, flash_attention, golden_attention, tiled_attention
from fa_study.rounding import Accumulation, RoundingPolicy

ALGORITHMS = ("baseline", "fa1", "fa2", "fa4")
FEATURES = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window and cap": {"window": (5, 3), "softcap": 3.0},
    "mask and bias": {"mask": "random", "bias": torch.randn(4, 1, 53, generator=torch.Generator().manual_seed(1))},
    "all": {"causal": "top_left", "window": (9, None), "mask": "random", "softcap": 2.0, "scale": 0.7},
}


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw(2, 4, 37, 24), draw(2, 2, 53, 24), draw(2, 2, 53, 12), draw(2, 4, 37, 12)


def features(name):
    options = dict(FEATURES[name])
    if options.get("mask") == "random":
        options["mask"] = torch.rand(2, 1, 37, 53, generator=torch.Generator().manual_seed(2)) > 0.7
    return options


def true_gradients(q, k, v, dout, **options):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(golden_attention(*leaves, **options).out, leaves, dout.double())


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("delta", ["output", "probabilities"])
def test_fp64_gradients_are_the_true_ones(algorithm, delta, name):
    x, options = problem(), features(name)
    policy = RoundingPolicy.uniform("fp64")
    got = attention_gradients(*x, policy=policy, algorithm=algorithm, delta=delta, tile=(11, 9), **options)
    for a, b in zip(got, true_gradients(*x, **options)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_errors_shrink_with_the_format():
    x = problem()
    true = true_gradients(*x)
    sizes = {}
    for fmt in ("bf16", "fp16", "fp32"):
        got = attention_gradients(*x, policy=RoundingPolicy.uniform(fmt), tile=(16, 16))
        sizes[fmt] = max((a - b).abs().max().item() for a, b in zip(got, true))
    assert sizes["bf16"] < 0.05 and sizes["fp16"] < 0.01 and sizes["fp32"] < 1e-5
    assert sizes["fp32"] < sizes["fp16"] < sizes["bf16"]


@pytest.mark.parametrize("site", ["grad_scores", "delta", "grad_accumulator"])
def test_each_backward_site_matters(site):
    x = problem(torch.float32)
    exact = attention_gradients(*x, policy=RoundingPolicy.uniform("fp32"), tile=(16, 16))
    coarse = attention_gradients(*x, policy=RoundingPolicy.uniform("fp32").replace(**{site: "bf16"}), tile=(16, 16))
    assert (coarse[0] - exact[0]).abs().max() > 1e-4
    # dV = P^T dO knows neither delta nor dS.
    assert torch.equal(coarse[2], exact[2]) == (site != "grad_accumulator")


def test_products_are_kept_as_the_policy_says():
    x = problem(torch.float32)
    exact = attention_gradients(*x, policy=RoundingPolicy.uniform("fp32"))
    policy = RoundingPolicy.uniform("fp32").replace(products=Accumulation("e8m13:toward_zero", every=16))
    assert all((a - b).abs().max() > 1e-5 for a, b in zip(attention_gradients(*x, policy=policy), exact))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_masked_nan_reaches_no_gradient(algorithm):
    q, k, v, dout = problem(torch.float32)
    mask = torch.ones(37, 53, dtype=torch.bool)
    mask[:, 7], mask[5] = False, False
    options = {"policy": RoundingPolicy.uniform("fp32"), "algorithm": algorithm, "mask": mask, "tile": (8, 16)}
    want = attention_gradients(q, k, v, dout, **options)
    for x, at in ((q, 5), (k, 7), (v, 7), (dout, 5)):
        x[:, :, at] = math.nan
    for a, b in zip(attention_gradients(q, k, v, dout, **options), want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (want[0][:, :, 5] == 0).all() and (want[1][:, :, 7] == 0).all() and (want[2][:, :, 7] == 0).all()


@pytest.mark.parametrize("length", [1, 2, 5, 17])
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_tiny_lengths_with_large_inputs_do_not_overflow(length, fmt):
    torch.manual_seed(length)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    q, k, v, dout = ((torch.randn(1, 2, length, 64) * 5).to(dtype) for _ in range(4))
    for algorithm in ("fa2", "fa4"):
        for causal in (None, "bottom_right"):
            grads = attention_gradients(
                q, k, v, dout, policy=RoundingPolicy.kernel(fmt), algorithm=algorithm, causal=causal
            )
            assert all(g.isfinite().all() and g.dtype == dtype for g in grads)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_model_gets_the_gradients_of_the_backward_pass(algorithm):
    q, k, v, dout = problem(torch.float32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {"policy": RoundingPolicy.uniform("bf16"), "algorithm": algorithm, "tile": (16, 16), "causal": "top_left"}
    out = tiled_attention(*leaves, **options)
    out.backward(dout)
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, attention_gradients(q, k, v, dout, **options)))
    if algorithm != "baseline":
        assert torch.equal(out, flash_attention(q, k, v, **options).out)


def test_training_under_a_policy_lowers_a_loss():
    torch.manual_seed(0)
    project = torch.nn.Linear(8, 24)
    x, target = torch.randn(4, 12, 8), torch.randn(4, 12, 8)
    optimizer = torch.optim.Adam(project.parameters(), 0.03)
    losses = []
    for _ in range(30):
        q, k, v = project(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        out = tiled_attention(q, k, v, policy=RoundingPolicy.uniform("bf16"), tile=(8, 8), algorithm="fa1")
        loss = (out.squeeze(1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_autocast_around_the_model_changes_no_bit():
    q, k, v, dout = problem(torch.float32)
    results = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = tiled_attention(*leaves, policy=RoundingPolicy.uniform("fp32"))
            out.backward(dout)
        results.append([out, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_results_come_in_the_dtype_of_the_model():
    q, k, v, dout = problem(torch.bfloat16)
    out = tiled_attention(q.requires_grad_(), k, v, policy=RoundingPolicy.uniform("fp32"))
    out.backward(dout)
    assert out.dtype == torch.bfloat16 and q.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change, words",
    [
        ({"delta": "rows"}, ["'rows'", "output", "probabilities"]),
        ({"dout": torch.ones(2, 4, 37, 13)}, ["dout", "(2, 4, 37, 12)", "(2, 4, 37, 13)"]),
        ({"algorithm": "fa7"}, ["'fa7'", "fa1"]),
    ],
)
def test_mistakes_are_named(change, words):
    q, k, v, dout = problem()
    arguments = {"dout": dout, "policy": RoundingPolicy.uniform("fp64")} | change
    with pytest.raises(ValueError) as error:
        attention_gradients(q, k, v, arguments.pop("dout"), **arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_a_trained_bias_is_refused():
    q, k, v, _ = problem()
    with pytest.raises(ValueError, match="no gradient for the bias"):
        tiled_attention(q, k, v, policy=RoundingPolicy.uniform("fp64"), bias=torch.zeros(37, 53, requires_grad=True))
