"""The scripts in examples/ run on a CPU. train_indexer.py has other tests (test_training_example.py)."""

import runpy
import sys

import pytest

from tests.documents import ROOT

EXAMPLES = {
    "swap_an_op": "largest difference",
    "prompts_with_drafts": "from the prefix cache",
    "glm_in_transformers": "dsa:",
    "what_the_indexer_picks": "a dot per selected key",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out


def test_every_example_is_in_the_readme():
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in scripts if f"examples/{name}.py" in text} == scripts == EXAMPLES.keys() | {"train_indexer"}


@pytest.mark.parametrize(
    ("argument", "said"),
    [("--help", "usage: "), ("/nowhere/a.png", "PICTURE: must be a file in an existing directory, got")],
)
def test_the_picture_is_checked_first(argument, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["what_the_indexer_picks.py", argument])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / "what_the_indexer_picks.py"), run_name="__main__")
    assert said in "".join(capsys.readouterr())
