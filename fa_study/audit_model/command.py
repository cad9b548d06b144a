"""Audit a model of transformers or diffusers: is the difference that another attention makes expected?

  python -m fa_study audit-model path/to/model eager sdpa
  python -m fa_study audit-model config.json sdpa flash_attention_2 --device cuda --report audit.html
  python -m fa_study audit-model MistralForCausalLM eager sdpa --set hidden_size=256 num_hidden_layers=4
  python -m fa_study audit-model path/to/unet AttnProcessor AttnProcessor2_0 --dtype fp16

MODEL is a folder that save_pretrained wrote, a config.json or a class (these two get random weights). Nothing is ever
downloaded, and no code from a model's folder is run. A and B: eager, sdpa, sdpa:math, sdpa:flash, emulated, what else
transformers registers, a diffusers processor class, or your own MODULE:FUNCTION.
Exit codes: 0 pass, 1 user error, 2 fail.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fa_study.audit.cases import DTYPES
from fa_study.audit.output import check_options, show_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a local folder, a config.json, or a class name")
    parser.add_argument("a", metavar="A", help="the attention that you had")
    parser.add_argument("b", metavar="B", help="the attention that you switched to")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (default cpu)")
    parser.add_argument("--inputs", type=Path, metavar="FILE.safetensors", help="for forward (default: made up)")
    parser.add_argument(
        "--set", nargs="+", type=_entry, default=[], metavar="NAME=VALUE", help="entries of the configuration"
    )
    parser.add_argument("--twins", type=int, default=3, metavar="N", help="perturbed copies (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs that are made up")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write everything as one offline page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything for programs")


def run(args: argparse.Namespace) -> int:
    """Audit, print, write; returns the exit code."""
    check_options(args)
    # transformers and diffusers take seconds to import, and not every command needs them.
    from fa_study.audit_model.inputs import read_inputs
    from fa_study.audit_model.load import load_model
    from fa_study.audit_model.report import print_report
    from fa_study.audit_model.run import audit_model

    model = load_model(args.model, dict(args.set), DTYPES[args.dtype]).to(args.device)
    report = audit_model(
        model,
        args.a,
        args.b,
        inputs=read_inputs(args.inputs, model) if args.inputs else None,
        twins=args.twins,
        seed=args.seed,
        say=lambda text: print(f"running {text} ...", file=sys.stderr),
    )
    return show_report(report, args, print_report, _page, width=160)


def _page(report) -> str:
    from fa_study.audit_model.page import to_html  # altair takes a second to import

    return to_html(report)


def _entry(text: str) -> tuple[str, object]:
    """NAME=VALUE, the value as JSON where it is that, else as text."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE such as num_hidden_layers=4, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
