"""Turn the project's docstrings into reStructuredText for autodoc: NumPy sections and plain prose.

Napoleon does not fit them. Types stand in the signatures, so that what follows a parameter's colon is often its
meaning: napoleon would take all of it for a type and look up every word. And prose is not reStructuredText: an
asterisk, a bar or a trailing underscore in it is just that sign.
"""

import pkgutil
import re
from importlib import import_module
from pathlib import Path

from sphinx.application import Sphinx

import fa_study

# The two pages to which every module is added that no page of the reference names: those of the results' packages to
# the first, all others to the second.
RESULTS, INSIDE = "api/results", "api/inside"
RESULT_PACKAGES = {"fa_study.experiments", "fa_study.figures", "fa_study.verdicts"}
_REST_ENTRY = """
## `{module}`

```{{eval-rst}}
.. automodule:: {module}
   :members:
   :exclude-members: {repeated}
```
"""

_ENTRY = re.compile(r"(?P<name>\S[^:`]*?) : (?P<text>.*)")
_BORDER = re.compile(r"=+( +=+)+")
_WORDS_OF_TYPES = {
    "int",
    "float",
    "str",
    "bool",
    "list",
    "dict",
    "tuple",
    "or",
    "of",
    "optional",
    "default",
    "callable",
}


def _is_type(text: str) -> bool:
    """Whether `text` only names types: "str or FloatFormat, optional", but not "a row per seed"."""
    words = re.findall(r"[\w.]+", re.sub(r'\{.*?\}|".*?"', "", text))
    return all(word in _WORDS_OF_TYPES or re.fullmatch(r"(\w+\.)*[A-Z]\w*|\w+\.\w+|\d+", word) for word in words)


def _escape(line: str) -> str:
    """`line` with the signs of reStructuredText taken literally, and with `code` as code."""
    bullet = re.match(r"\s*([*-] )?", line).group()
    pieces = re.split(r"(``.+?``|`[^`]+`)", line[len(bullet) :])
    for i, piece in enumerate(pieces):
        pieces[i] = f"``{piece.strip('`')}``" if i % 2 else re.sub(r"([*|\\]|_(?!\w))", r"\\\1", piece)
    return bullet + "".join(pieces)


def _sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    """The docstring cut at its underlined headings; the first piece has no heading."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        body = found[-1][1]
        if re.fullmatch(r"-{3,}", line) and body and body[-1].strip():
            found.append((body.pop().strip(), []))
        else:
            body.append(line)
    return found


def _table(rows: list[str], start: int) -> list[str]:
    """The rows of a two-column table as a list of terms, where long explanations may wrap on a phone."""
    out: list[str] = []
    for row in rows:
        term, text = row[:start].strip(), _escape(row[start:].strip())
        out += [_escape(term), f"    {text}"] if term else [f"    {text}"]
    return ["", *out, ""]


def _prose(lines: list[str]) -> list[str]:
    """Paragraphs, tables as lists, and deeper blocks, such as formulas and layouts, letter by letter."""
    out: list[str] = []
    rows: list[str] | None = None
    in_block, start = False, 0
    for line in lines:
        if _BORDER.fullmatch(line):
            out += _table(rows, start) if rows is not None else []
            rows, start = ([], line.rindex(" ") + 1) if rows is None else (None, 0)
        elif rows is not None:
            rows.append(line)
        elif line.startswith(" ") and line.strip():
            out += [] if in_block else ["", "::", ""]
            out.append("    " + line)
            in_block = True
        else:
            out += [""] if in_block and line else []
            out.append(line if line.startswith(">>>") else _escape(line))
            in_block = in_block and not line
    return out


def _entries(heading: str, lines: list[str]) -> list[str]:
    """A field whose entries are the names in bold, with type or meaning, and what is indented below each."""
    out = [f":{heading}:"]
    for line in lines:
        entry = _ENTRY.fullmatch(line)
        out += [""] if entry else []
        if entry and _is_type(entry["text"]):
            out.append(f"    **{_escape(entry['name'])}** : *{_escape(entry['text'])}*")
        elif entry:
            out += [f"    **{_escape(entry['name'])}**", f"        {_escape(entry['text'])}"]
        else:
            # A name, type or error alone: the text below it is deeper and makes it a term.
            is_term = re.fullmatch(r"[\w.*]+(, [\w.*]+)*", line)
            out.append(f"    **{_escape(line)}**" if is_term else "    " + _escape(line))
    return [*out, ""]


_ENTRY_SECTIONS = {"Parameters", "Other Parameters", "Attributes", "Raises", "Returns", "Yields", "Warns"}


def convert(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    result: list[str] = []
    for heading, body in _sections(lines):
        if heading in _ENTRY_SECTIONS:
            result += _entries(heading, body)
        else:
            result += [f".. rubric:: {heading}", ""] if heading else []
            result += _prose(body)
    lines[:] = result


def add_remaining_modules(app: Sphinx, docname: str, source: list[str]) -> None:
    """Complete the last pages of the reference, so that a new module is in it from its first day."""
    if docname not in (RESULTS, INSIDE):
        return
    pages = "\n".join(page.read_text() for page in Path(app.srcdir, "api").glob("*.md"))
    named = set(re.findall(r"automodule:: (\S+)", pages))
    # What a named module offers is described there, wherever it was defined.
    offered = {id(vars(m)[name]) for m in map(import_module, named) for name in getattr(m, "__all__", ())}
    for info in pkgutil.walk_packages(fa_study.__path__, "fa_study."):
        page = RESULTS if info.name.rpartition(".")[0] in RESULT_PACKAGES else INSIDE
        if info.ispkg or info.name in named or "._" in info.name or page != docname:
            continue
        repeated = [name for name, value in vars(import_module(info.name)).items() if id(value) in offered]
        source[0] += _REST_ENTRY.format(module=info.name, repeated=", ".join(repeated))


def setup(app: Sphinx) -> dict:
    app.connect("source-read", add_remaining_modules)
    app.connect("autodoc-process-docstring", convert)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
