"""The command line: python -m fa_study COMMAND. Exit codes: 0 done, 1 user error, 130 interrupted, others as the
command says.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings

# Each command is a module with add_arguments(parser) and run(args) -> exit code, described by its docstring.
COMMANDS = {
    "audit": "fa_study.audit.command",
    "audit-model": "fa_study.audit_model.command",
    "compare": "fa_study.compare.command",
    "kernels": "fa_study.kernels.command",
    "twin": "fa_study.compare.twin",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        # argparse exits with 2, which here means that a threshold was exceeded.
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _Parser(prog="python -m fa_study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {}
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        summary = module.__doc__.strip().splitlines()[0]
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        runs[name] = module.run
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            return runs[args.command](args)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
