"""examples/train_indexer.py with a small model on a CPU: all training stages, measurements and written files."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_indexer  # noqa: E402
from indexer_training import report, small_model  # noqa: E402
from indexer_training.corpus import Corpus, draw, pieces, spread  # noqa: E402
from indexer_training.measure import acceptance, held_out_loss, recall  # noqa: E402
from indexer_training.optimizer import Optimizer  # noqa: E402
from indexer_training.passes import Passes  # noqa: E402
from indexer_training.small_model import build, fields, save  # noqa: E402
from indexer_training.stages import ALONE, Plan, _balanced, _Losses, language_loss, selecting, train_stage  # noqa: E402
from indexer_training.vocabulary import BEGIN, train_tokenizer  # noqa: E402

from dsa_layers.batch import packing  # noqa: E402
from dsa_layers.batch.sequence_batch import SequenceBatch  # noqa: E402
from dsa_layers.command.main import main  # noqa: E402
from dsa_layers.engine.fuse import fused  # noqa: E402
from dsa_layers.io.directory import SINGLE_NAME  # noqa: E402
from dsa_layers.layers.moe import MoE  # noqa: E402
from tests.tiny_training import measure_little, text_of, write_corpus  # noqa: E402

SMALL = {"index_topk": 32, "hidden_size": 128, "intermediate_size": 128, "n_routed_experts": 2}
WITH_VOCAB = SMALL | {"vocab_size": 300}
PLAN = Plan(
    (12, 4, 4),
    rates=(1e-2, 3e-3, 3e-4),
    batch=(2, 2, 2),
    every=(6, 2, 2),
    length=64,
    vocab=300,
    held_out=400,
    fields=SMALL,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    write_corpus(root)
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch.setattr)
        return text_of(root)


@pytest.fixture(scope="module")
def corpus(text):
    return Corpus.of(text, train_tokenizer(text.train, 300))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build(WITH_VOCAB, torch.float32)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def out(text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch.setattr)
        train_indexer.run(directory, PLAN, "cpu", text)
    return directory


@pytest.fixture(scope="module")
def metrics(out):
    return json.loads((out / "model" / "metrics.json").read_text())


def test_sequences(corpus):
    drawn = draw(corpus.train, 5, 40, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 41) and drawn.dtype == torch.int64 and (drawn[:, 0] == BEGIN).all()
    whole = pieces(corpus.held_out["library"], 40)
    assert torch.equal(whole[:, 1:].flatten(), corpus.held_out["library"][: whole[:, 1:].numel()].long())
    assert spread(whole, 3).tolist() == whole[:: -(-len(whole) // 3)].tolist() and len(spread(whole, 3)) == 3
    assert spread(whole, 1000) is whole


def test_tokens_and_bytes(corpus, text):
    (held_out,) = text.held_out["library"]
    tokens = corpus.held_out["library"]
    assert tokens[0] == BEGIN and int((corpus.train == BEGIN).sum()) == len(text.train)
    assert int(corpus.bytes_of[tokens.long()].sum()) == len(held_out.encode())
    few = corpus.first_pieces("library", 10, 500)
    assert 500 - 10 * int(corpus.bytes_of.max()) < corpus.bytes_in(few) <= 500
    assert len(corpus.first_pieces("library", 10, 1)) == 1


def test_who_learns_when(corpus, model):
    plan = Plan(steps=(1, 1, 1), batch=(1, 1, 1), length=64)
    for name, in_indexers, elsewhere in (("dense", False, True), ("warmup", True, False), ("sparse", True, True)):
        before = weights_of(model)
        train_stage(model, name, plan, corpus.train)
        changed = {n: not torch.equal(p, before[n]) for n, p in model.named_parameters()}
        for part in ("model.", "drafter."):
            of_part = {n: other for n, other in changed.items() if n.startswith(part)}
            assert any(of_part[n] for n in of_part if ".indexer." in n) == in_indexers, (name, part)
            assert any(of_part[n] for n in of_part if ".indexer." not in n) == elsewhere, (name, part)
        assert all(p.requires_grad for n, p in model.named_parameters() if "correction_bias" not in n)


def test_later_passes_of_a_shape_read_nothing_from_the_host(corpus, model, monkeypatch):
    """A GPU runs them as a CUDA graph."""
    passes = Passes(_Losses(model, None, ALONE), model.parameters(), captured=False)
    tokens, weights = draw(corpus.train, 2, 32, torch.Generator().manual_seed(0)), torch.tensor([1.0, 0.5, 0.0])
    with selecting(model, 32):
        first = passes(tokens, weights)
        monkeypatch.setattr(packing, "on_host", None)
        assert torch.equal(passes(tokens, weights), first)


def test_the_lowest_loss_says_whose_weights_remain(corpus, model):
    plan = Plan(steps=(5, 0, 0), batch=(1, 1, 1), every=(2, 2, 2), length=32)
    losses, seen = {2: 3.0, 4: 1.0, 5: 2.0}, {}

    def watch(step):
        seen[step] = weights_of(model)
        return losses[step]

    _, facts = train_stage(model, "dense", plan, corpus.train, watch)
    assert list(seen) == [2, 4, 5] and facts["steps"] == 5 and facts["best_step"] == 4
    assert all(torch.equal(p, seen[4][n]) for n, p in model.named_parameters())
    assert not torch.equal(model.lm_head.weight, seen[5]["lm_head.weight"])


@pytest.mark.parametrize(("seconds", "steps"), [(55.5, 46), (28, 20), (1000, 50)])
def test_a_stage_ends_in_time(corpus, model, monkeypatch, seconds, steps):
    """On the fake clock, the first step takes 10 seconds, and each later step 1 second. Every 20 steps, the stage
    computes how many more steps fit in `seconds`. So at least 20 steps run."""
    plan = Plan(steps=(50, 0, 0), seconds=(seconds, 1, 1), batch=(1, 1, 1), length=8)
    ends = iter(range(10, 1000))
    clock = [0]

    def draw_a_second_later(*_):
        clock[0] = next(ends)
        return corpus.train[None, :9].long()

    monkeypatch.setattr("indexer_training.stages.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("indexer_training.stages.draw", draw_a_second_later)
    monkeypatch.setattr(Optimizer, "step", lambda *_: None)  # it would take nine tenths of the test's time
    _, facts = train_stage(model, "dense", plan, corpus.train)
    assert facts["steps"] == steps and facts["seconds"] == steps + 9


def test_experts_are_balanced_by_what_is_trained_on(corpus):
    """Held-out text goes through the same gates as training text, but must not affect their biases."""
    torch.manual_seed(0)
    model = build(WITH_VOCAB | {"n_routed_experts": 4}, torch.float32)
    (gate,) = (layer.mlp.gate for layer in model.model.layers if isinstance(layer.mlp, MoE))
    torch.nn.init.normal_(gate.weight)
    trained, held_out = (pieces(corpus.train, 64)[i : i + 1] for i in (0, 1))
    biases = []
    for between in (False, True):
        with torch.no_grad():
            gate.e_score_correction_bias.zero_()
        with _balanced(model, True, ALONE) as balance:
            language_loss(model, trained)
            if between:
                gate.weight.data.neg_()  # so that held-out text selects other experts
                held_out_loss(model, held_out, 64)
                gate.weight.data.neg_()
            balance()
        biases.append(gate.e_score_correction_bias.tolist())
    assert biases[0] == biases[1] and any(biases[0])


def step_of(model, rate):
    """Return {parameter's name: the change that an optimizer's first update makes}. At step 1 of 10, the scheduled
    learning rate is about `rate`."""
    before = weights_of(model)
    Optimizer(dict(model.named_parameters()), rate).step(1, 10)
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def test_decay_leaves_norms_and_the_embedding(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decayed = {name for name, moved in step_of(model, 0.1).items() if moved.any()}
    assert "lm_head.weight" in decayed and "model.embed_tokens.weight" not in decayed
    assert not any("norm" in name or "bias" in name for name in decayed)


def test_steps_of_matrices(model):
    """An update has AdamW's typical size: a fifth of the learning rate as root mean square. Its singular values are
    similar, and it does not depend on the gradient's size. Each expert counts as a separate matrix."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        if parameter.dim() == 3:
            parameter.grad[0] *= 1000
    rate = 1e-3
    moved = step_of(model, rate)
    for name in ("model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"):
        for matrix in moved[name].reshape(-1, *moved[name].shape[-2:]):
            assert 0.15 * rate < matrix.square().mean().sqrt() < 0.25 * rate, name
            singular = torch.linalg.svdvals(matrix)
            assert singular.max() < 3 * singular.min(), name
    gate = moved["model.layers.1.mlp.gate.weight"]  # by AdamW, whose first update is about +-rate
    assert gate.abs().max() == pytest.approx(rate, rel=0.2)


@pytest.mark.slow
def test_losses_fall(out):
    rows = list(csv.DictReader((out / "losses.csv").open()))
    assert [row["stage"] for row in rows] == ["dense"] * 12 + ["warmup"] * 4 + ["sparse"] * 4
    for column in ("language loss", "drafter's loss"):
        values = [float(row[column]) for row in rows]
        assert values[11] < values[0] - 0.5, column
    indexer = [float(row["indexer loss"]) for row in rows]
    assert not any(indexer[:12]) and sum(indexer[16:]) < sum(indexer[12:16])


@pytest.mark.slow
def test_metrics(metrics):
    losses = metrics["held_out"]["loss"]["library"]
    assert losses["warmup, all keys"] == losses["dense, all keys"]
    assert [step for step, _ in metrics["held_out"]["while"]["dense"]] == [6, 12]
    assert metrics["stages"]["dense"]["best_step"] == 12
    assert abs(losses["sparse, top-k, FP8"] - losses["sparse, top-k"]) < 0.02
    for shares in metrics["recall"].values():
        assert len(shares["indexer"]) == metrics["model"]["layers"] + 1
        for chosen, best, random in zip(shares["indexer"], shares["oracle"], shares["random"]):
            assert 0 < random < best <= 1 and chosen <= best + 1e-6
    found = metrics["acceptance"]
    # `packages` can be too short for a sequence.
    assert found["positions"] in (8, 16) and len(found["right"]) == len(found["taken"]) == 3
    assert found["taken"] == sorted(found["taken"]) and found["taken"][0] == pytest.approx(found["right"][0])


@pytest.mark.slow
def test_what_is_written(out, text, metrics):
    rows = list(csv.DictReader((out / "losses.csv").open()))
    written = report.tables(metrics, rows)
    loss = metrics["held_out"]["loss"]["library"]["sparse, top-k, FP8"]
    assert written.count("nan") == 0 and f"{loss:.4f}" in written
    assert (out / "model" / "held_out.txt").read_text() == text.excerpt[1]
    assert (out / "model" / "LICENSE.packages.txt").read_text() == text.licences
    assert (out / "losses.png").stat().st_size > 10_000
    assert (out / "table.md").read_text() == written
    assert (out / "model" / "README.md").read_text() == report.card(metrics, written)
    assert "| layers | 1.0 | MIT |" in report.card(metrics, written)
    document = f"a\n{report.BEGIN_MARK}\nold\n{report.END_MARK}\nb\n"
    assert report.fill(document, written) == document.replace("old\n", written)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_checkpoint_drafts(temperature, out, capsys):
    """Drafts do not change the tokens that `dsa generate` writes."""
    texts = []
    # Longer than index_topk. Several, because the small model may end a text at once.
    prompts = ["import torch\n" * 6, "        return x\n" * 5, "class A:\n" * 6]
    options_of_prompts = [option for prompt in prompts for option in ("--prompt", prompt)]
    for drafts in ("0", "2"):
        options = ["--max-tokens", "16", "--draft", drafts, "--temperature", temperature, "--seed", "3", "--json"]
        precision = ["--device", "cpu", "--dtype", "float32"]
        assert main(["generate", str(out / "model"), *options_of_prompts, *options, *precision]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        tokens = [(event["sequence"], event["token"]) for event in events if event["event"] == "token"]
        texts.append(sorted(tokens, key=lambda token: token[0]))
        (throughput,) = [event for event in events if event["event"] == "throughput"]
        assert (throughput["drafted"] > 0) == (drafts == "2")
    assert texts[0] == texts[1] and len(prompts) < len(texts[0]) <= 16 * len(prompts)


def test_the_size_of_what_ships(tmp_path):
    """With the default plan, the saved model has nearly 4 MB. The drafter's tensors have the published names. Tensors
    that the drafter shares with the model are not stored twice."""
    changes = {"vocab_size": Plan.vocab}
    model = build(changes, torch.float32)
    save(model, tmp_path, fields(changes, quantized=True))
    assert 3_900_000 < (tmp_path / SINGLE_NAME).stat().st_size < 4_000_000
    with safe_open(tmp_path / SINGLE_NAME, "pt") as tensors:
        names = {name.removeprefix("model.layers.2.") for name in tensors.keys() if "layers.2." in name}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"} < names
    assert not {"embed_tokens.weight", "shared_head.head.weight"} & names


def test_acceptance_is_that_of_single_steps(corpus, model):
    """Compare with decoding step by step on paged caches. The drafter's first step reads the text and the model's
    states up to there. Its later steps read the text's next token and the drafter's previous state."""
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        model.lm_head.weight[3:] = 0  # so that the model and the drafter often agree
    sequence = pieces(corpus.held_out["library"], 60)[0]
    drafts, count = 3, 8
    found = acceptance(model, sequence[None], drafts, positions=count)

    matches = []
    for t in torch.linspace(0, 59 - drafts, count, dtype=torch.float64).long().tolist():
        cache, drafters = (module.make_cache(num_pages=2) for module in (model, model.drafter))
        row = []
        with torch.inference_mode(), fused(model):
            batch = SequenceBatch.paged([t + 1], [t + 1], [[1]], model.page_size)
            states = model.states(sequence[: t + 1], batch, cache)
            drafted = model.drafter(sequence[1 : t + 2], states, batch, drafters)[-1:]
            for k in range(drafts):
                guess = model.drafter.logits(drafted).argmax()
                batch = SequenceBatch.paged([1], [t + 2 + k], [[1]], model.page_size)
                state = model.states(sequence[t + 1 + k : t + 2 + k], batch, cache)
                row.append(bool(guess == model.logits(state).argmax()))
                drafted = model.drafter(sequence[t + 2 + k : t + 3 + k], drafted, batch, drafters)
        matches.append(row)
    expected = torch.tensor(matches).double()
    assert found.positions == count and 0 < expected.sum() < count * drafts
    assert found.right == expected.mean(0).tolist()
    assert found.taken == pytest.approx(expected.cumprod(1).mean(0).cumsum(0).tolist())


def test_recall_of_known_indexers(corpus, model):
    """With zero head weights, every index score is zero. The shares of oracle and random do not depend on the
    scores."""
    tokens = pieces(corpus.held_out["library"], 64)[:1]
    for parameter in (p for n, p in model.named_parameters() if n.endswith("weights_proj.weight")):
        torch.nn.init.zeros_(parameter)
    shares = recall(model, tokens, 63, dense=True)
    # Only the last token sees 64 keys, one more than 63. The best selection leaves out the key with the smallest
    # weight, at most 1 / 64.
    assert all(best > 1 - 1 / 64 for best in shares.oracle)
    assert shares.random == pytest.approx([63 / 64] * 3)


def test_selecting_is_undone(model):
    layers = [*model.model.layers, model.drafter.block]
    with selecting(model, 7):
        assert {layer.self_attn.indexer.top_k for layer in layers} == {7}
    assert {layer.self_attn.indexer.top_k for layer in layers} == {32}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["OUT", "--vocab", "9"], "--vocab: must be at least 257, the bytes and the token that begins a file, got 9"),
        (["OUT", "--length", "3"], "--length: must be at least 4, got 3"),
        (["OUT", "--length", "64"], "--config: index_topk: must be at most the 64 tokens of a sequence, got 128"),
        (["train_indexer.py"], "OUT: must be a directory, got train_indexer.py"),
        (["OUT", "--device", "foo"], "--device: must be cpu, cuda or cuda:N, got 'foo'"),
        (["OUT", "--device", "cuda"], "--device: got 'cuda', but torch sees no CUDA GPU"),
        (["OUT", "--steps", "0", "1", "1"], "argument --steps: must be at least 1, got 0"),
        (["OUT", "--batch", "1", "0", "1"], "argument --batch: must be at least 1, got 0"),
        (["OUT", "--held-out", "0"], "argument --held-out: must be at least 1, got 0"),
        (["OUT", "--seconds", "-1", "1", "1"], "argument --seconds: must be a finite number above 0, got '-1'"),
    ],
)
def test_wrong_calls(arguments, problem, monkeypatch, capsys):
    """Reading the text takes a while, so the arguments are checked before."""
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["train_indexer.py", *arguments])
    monkeypatch.setattr(train_indexer, "read_text", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        train_indexer.main()
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"error: {problem}\n")


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_indexer.py", "--help"])
    with pytest.raises(SystemExit):
        train_indexer.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "trained as the paper trains: dense, then its indexers alone, then sparse." in told
    assert told.count("(default: ") == 7
    assert "--seconds DENSE WARMUP SPARSE of each stage at most (default: 450 40" in told


def test_a_report_of_nothing(tmp_path):
    script = ROOT / "examples" / "indexer_training" / "report.py"
    for arguments in ([], [str(tmp_path)]):
        done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("usage: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index_topk": 65}, "index_topk: must be at most the 64 tokens of a sequence, got 65"),
        ({"vocab_size": 3}, "vocab_size: is set by the example"),
        ({"hidden_size": 100}, "config.json: in_features: must be a multiple of 128, got 100"),
        ({"index_n_heads": "a"}, "field 'index_n_heads' is 'a'"),
    ],
)
def test_fields_that_cannot_be_trained_are_refused_before(changes, problem):
    small_model.check({"index_topk": 64}, 64)
    with pytest.raises(ValueError, match=problem):
        small_model.check(changes, 64)
