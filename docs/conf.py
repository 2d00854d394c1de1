"""The site of these pages: `make docs`."""

import re
import tomllib
from pathlib import Path

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
    """The lists of an index page are its tables of contents, each with its heading as caption."""
    for caption, entries in re.findall(r"^## (.*)\n\n((?:- .*\n)+)", source[0], re.M) if page.endswith("index") else ():
        pages = "\n".join(re.findall(r"^- \[.*?\]\((.*?)\.md\)", entries, re.M))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def link_files(app, page, source):
    """Links to files that are no pages lead to the repository, or where it has no address to copies in the site."""

    def link(found):
        path = (app.srcdir / page).parent.joinpath(found[2]).resolve()
        if path.is_relative_to(app.srcdir):
            return found[0]
        if REPOSITORY:
            return f"[{found[1]}]({REPOSITORY}/blob/main/{path.relative_to(ROOT)})"
        return f"{{download}}`{found[1].replace('`', '')} <{found[2]}>`"

    source[0] = re.sub(r"\[([^][]*)\]\((\.\./[^)#\s]*)\)", link, source[0])


def setup(app):
    app.connect("source-read", add_toctrees)
    app.connect("source-read", link_files)
