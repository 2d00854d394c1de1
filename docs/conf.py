"""Sphinx configuration of the site: `make docs` builds it."""

import re
import tomllib
from pathlib import Path

from markdown_it import MarkdownIt
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Repository")

project = html_title = "dsa"
release = PROJECT["version"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
exclude_patterns = ["pictures"]
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_show_copyright = html_copy_source = False


def add_toctrees(app, page, source):
    """Make each list of an index page a table of contents: its heading is the caption, its links are the titles."""
    if not page.endswith("index"):
        return
    for caption, entries in re.findall(r"^## (.*)\n\n((?:[-*] .*\n(?: +.*\n)*)+)", source[0], re.M):
        links = re.findall(r"^[-*] \[([^]]*)\]\(([^)]*)\.md\)", entries, re.M)
        if len(links) != len(re.findall(r"^[-*] ", entries, re.M)):
            raise ExtensionError(f"{page}: each item under {caption!r} must begin with a link to a page of docs/")
        pages = "\n".join(f"{title} <{target}>" for title, target in links)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def link_files(app, page, source):
    """Link files outside docs/ to the repository, or to a copy in the site while pyproject.toml has no repository."""

    def link(found):
        text, target = found.groups()
        path = (app.srcdir / page).parent.joinpath(target).resolve()
        if path.is_relative_to(app.srcdir):
            return found[0]
        if REPOSITORY:
            return f"[{text}]({REPOSITORY}/blob/main/{path.relative_to(ROOT)})"
        return f"{{download}}`{text.replace('`', '')} <{target}>`"

    source[0] = re.sub(r"\[([^][]*)\]\((\.\./[^)#\s]*)\)", link, source[0])


def check_labels(app, page, source):
    """Markdown shows [text][label] as it is written where label is not defined. Formulas like x[t][h] are meant so."""
    for block in MarkdownIt("commonmark").parse(source[0]):
        for part in block.children or ():
            if part.type == "text" and (found := re.search(r"\[[^][]{3,}\]\[[^][]*\]", part.content)):
                raise ExtensionError(f"{page}: {found[0]} has no definition")


def setup(app):
    app.connect("source-read", check_labels)
    app.connect("source-read", add_toctrees)
    app.connect("source-read", link_files)
