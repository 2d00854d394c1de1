"""Remove comments and docstrings from Python source."""

import ast
import io
import tokenize


def code_lines(source: str) -> list[str]:
    """Return the lines of `source` without comments and docstrings. Lines with only a comment are removed. Blank lines
    are kept, and so are docstrings that share a line with code."""
    lines = source.split("\n")  # as ast and tokenize do; splitlines() also splits at form feeds
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if "#" in source else ():
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
            if not lines[row - 1]:
                lines[row - 1] = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            first, last = docstring.lineno - 1, docstring.end_lineno - 1
            before = lines[first].encode()[: docstring.col_offset].strip()
            if not before and not lines[last].encode()[docstring.end_col_offset :].strip():
                lines[first : last + 1] = [None] * (last + 1 - first)
    return [line for line in lines if line is not None]
