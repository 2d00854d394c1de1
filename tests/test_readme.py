"""Examples, commands, paths and links in the README and the documents work."""

import re
import shlex
from pathlib import Path

import pytest

from dsa_layers import Generator, SamplingParams
from dsa_layers.command.main import main
from dsa_layers.command.parser import make_parser
from dsa_layers.models.registry import FAMILIES
from tests.documents import python_blocks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXT = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(DOCS.rglob("*.md")),
]


COMMANDS = (DOCS / "reference" / "cli.md").read_text()
TINY_COMMANDS = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^dsa \w+ \.tiny.*", COMMANDS, re.M)]
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)


@pytest.mark.parametrize(
    "block", [b for b in python_blocks() if b not in BLOCKS], ids=lambda block: f"{len(block)} characters"
)
def test_the_documents_python_runs(block):
    exec(block, {})


def test_requests_that_come_and_go(capsys):
    """A script of at most 30 lines: each request gets the text that it gets alone, and the aborted one only a part."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "how-to/serve-requests.md").read_text(), re.S | re.M)
    assert len(block.splitlines()) <= 30
    exec(block, names := {})
    prompts = ("def merge(left, right):\n", "class Stack:\n", "import os\n")
    alone = Generator(names["model"], names["engine"].tokenizer).generate(prompts, SamplingParams(max_tokens=16))
    texts = [done.text for done in alone]
    assert [names["texts"][0], names["texts"][2]] == [texts[0], texts[2]]
    assert texts[1].startswith(names["texts"][1]) and 0 < len(names["texts"][1]) < len(texts[1])
    assert names["reasons"] == {0: "length", 2: "length"} and "request 1: " in capsys.readouterr().out


def test_the_three_examples():
    scores, checkpoint, training = ({}, {}, {})
    for block, names in zip(BLOCKS, (scores, checkpoint, training), strict=True):
        exec(block, names)
    assert scores["indices"].shape == (64, 128) and (scores["indices"] >= 0).all()
    assert checkpoint["logits"].shape == (2, checkpoint["model"].config.vocab_size)
    assert all(len(done.tokens) for done in checkpoint["done"])
    assert all(parameter.grad is not None for parameter in training["stage"].parameters())


def test_every_family_has_its_commands_for_a_tiny_checkpoint():
    assert [command[0] for command in TINY_COMMANDS] == ["tiny", "generate"] * len(FAMILIES)
    parser = make_parser()
    models = [parser.parse_args(command).model for command in TINY_COMMANDS if command[0] == "tiny"]
    assert sorted(models) == sorted(FAMILIES)
    written, read = ([command[1] for command in TINY_COMMANDS if command[0] == name] for name in ("tiny", "generate"))
    assert written == read


@pytest.mark.slow
def test_the_tiny_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in TINY_COMMANDS:
        short = ["--max-tokens", "2", "--device", "cpu"] if command[0] == "generate" else []
        assert main(command + short) == 0, capsys.readouterr().err


def test_every_path_and_command_exists():
    for path in re.findall(r"^\| `([\w/.-]+)` \|", TEXT, re.M):
        if "/" in path:
            assert (ROOT / path).exists(), path
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`([\w.-]+/[\w/.-]*)`", contributing):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([\w-]+)", TEXT + contributing, re.M)) <= targets


def anchors(page):
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_every_page_is_of_one_kind_and_listed_once():
    """The kind of a page is its folder in docs/; `upstream` has what could be proposed to engines. Families of ops are
    listed in their folder's index.md, other pages in docs/index.md."""
    pages = [path.relative_to(DOCS) for path in DOCS.rglob("*.md") if path != DOCS / "index.md"]
    assert {page.parts[0] for page in pages} <= {"tutorials", "how-to", "reference", "explanation", "upstream"}
    lists = {index.parent: index.read_text() for index in DOCS.rglob("index.md")}
    listed = [folder / to for folder, text in lists.items() for to in re.findall(r"^- \[.*?\]\((.*?)\)", text, re.M)]
    assert sorted(path.relative_to(DOCS) for path in listed) == sorted(pages)


def test_every_folder_is_on_the_architecture_page():
    text = (DOCS / "explanation" / "architecture.md").read_text()
    families = {path.name for path in (ROOT / "dsa" / "ops").iterdir() if path.is_dir()} - {"__pycache__"}
    for package in ("dsa", "dsa_layers", "dsa_bench", "dsa_engines", "tests"):
        folders = {path.name for path in (ROOT / package).iterdir() if path.is_dir()} - {"__pycache__"}
        if package == "dsa_bench":
            assert families <= folders
            folders -= families
        assert set(re.findall(rf"^\| `{package}/(\w+)` \|", text, re.M)) == folders
