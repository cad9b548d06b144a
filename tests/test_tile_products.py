"""The bits of an element of a tile product depend on its row, its column and its terms alone, on every processor."""

import pytest
import torch

from fa_study.attention.tile_products import padded, product
from fa_study.rounding import Accumulation

ROWS, TERMS, COLUMNS = 64, 576, 192


@pytest.fixture(params=["fp32", "fp64"])
def operands(request):
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[request.param]
    return torch.randn(2, ROWS, TERMS, dtype=dtype), torch.randn(2, TERMS, COLUMNS, dtype=dtype), request.param


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("rows", [16, 48])
def test_fewer_rows_and_columns(operands, rows, columns):
    a, b, fmt = operands
    whole = product(a, b, Accumulation(fmt))
    part = product(a[:, -rows:].contiguous(), b[..., -columns:].contiguous(), Accumulation(fmt))
    assert torch.equal(part, whole[:, -rows:, -columns:])
    other_layout = b[..., -columns:].mT.contiguous().mT
    assert torch.equal(product(a[:, -rows:].contiguous(), other_layout, Accumulation(fmt)), part)


@pytest.mark.parametrize("width", [32, 64, 128, 192, 256, 320, 576])
def test_zeros_behind_the_terms(operands, width):
    a, b, fmt = operands
    for terms in (16, 32, *range(64, width, 64)):
        if terms < width:
            short = a[..., :terms].contiguous(), b[:, :terms].contiguous()
            long = padded(short[0], ROWS, width), padded(short[1], width, COLUMNS)
            assert torch.equal(product(*short, Accumulation(fmt)), product(*long, Accumulation(fmt))), terms


def test_the_result_goes_where_it_is_told(operands):
    a, b, fmt = operands
    for columns in (16, COLUMNS):
        out = torch.empty(2, ROWS, columns, dtype=a.dtype)
        part = b[..., :columns].contiguous()
        assert torch.equal(product(a, part, Accumulation(fmt), out=out), out)
        bound = TERMS * torch.finfo(a.dtype).eps * (a.double().abs() @ part.double().abs())  # two sums, TERMS roundings
        assert ((out - a.double() @ part.double()).abs() <= bound).all()
