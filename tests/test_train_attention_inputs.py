"""Real attention inputs kept for the micro-benchmark: which rows, and in which format."""

import torch

from train.attention_inputs import QUERIES, as_table


def test_queries_are_spread_and_values_are_bf16():
    q, k, v = (torch.arange(128.0 * 4).reshape(128, 4) / 7 + shift for shift in (0, 1000, 2000))
    table = as_table([(q, k, v), (k, q, v)])
    counts = table.groupby(["sample", "tensor"]).size()
    assert counts.to_dict() == {(s, t): QUERIES if t == "q" else 128 for s in (0, 1) for t in "kqv"}
    queries = table[(table["sample"] == 0) & (table["tensor"] == "q")]
    assert queries["position"].tolist() == list(range(0, 128, 4))
    assert queries["d1"].tolist() == q[::4, 1].bfloat16().float().tolist()
