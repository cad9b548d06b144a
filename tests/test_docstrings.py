"""The examples in the docstrings do what they show."""

import doctest
import pkgutil
from importlib import import_module

import pytest
import torch

import fa_study

MODULES = [info.name for info in pkgutil.walk_packages(fa_study.__path__, "fa_study.") if "__main__" not in info.name]
# What the examples take as given.
GIVEN = {"torch": torch, "shards": [torch.ones(3, dtype=torch.bfloat16)]}
EXAMPLES = {
    name: tests
    for name in MODULES
    if (
        tests := [test for test in doctest.DocTestFinder().find(import_module(name), extraglobs=GIVEN) if test.examples]
    )
}


class Checker(doctest.OutputChecker):
    """An example that shows no output shows how to call, not what a prompt would print."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want == "" or super().check_output(want, got, optionflags)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings(name):
    for test in EXAMPLES[name]:
        messages: list[str] = []
        result = doctest.DocTestRunner(Checker(), optionflags=doctest.NORMALIZE_WHITESPACE).run(
            test, out=messages.append
        )
        assert result.failed == 0, "".join(messages)


def test_there_are_examples():
    assert EXAMPLES, "no docstring of fa_study has an example: this file would test nothing"
