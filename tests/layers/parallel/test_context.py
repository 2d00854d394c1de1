"""Ranks that share the tokens of packed sequences train indexers as one rank does."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from dsa_layers.parallel import launch
from dsa_layers.parallel import ranks as parallel_ranks
from dsa_layers.parallel.context import cut
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.training import STAGES, IndexerStage
from tests.layers.parallel.processes import in_ranks
from tests.layers.training.test_changed_indexer import DotProductIndexer
from tests.layers.training.test_indexer_stage import Small

# Tokens per sequence. The first sequence has more tokens than a rank gets.
LENS = [37, 5, 1, 20]
TOP_K = 6
TOLERANCE = 2e-5  # relative; several ranks add the same numbers in another order than one rank
ALONE = Ranks(0, 1)


def trained(name, ranks, own_indexer=False, checkpointed=False):
    """Run the forward and backward pass of a small model in stage `name`. `ranks` share the tokens. Return means over
    the ranks: ([loss of the outputs, loss of the indexers], {parameter: gradient})."""
    model = Small(TOP_K)
    if own_indexer:
        torch.manual_seed(3)
        model.layers[1].indexer = DotProductIndexer(64, 32, TOP_K, 16)
    for layer in model.layers if checkpointed else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    tokens, weights = torch.arange(sum(LENS)) * 7 % 50, torch.linspace(-1, 1, sum(LENS))
    with IndexerStage(model, name) as stage:
        share = stage.share(LENS, ranks)
        out = model(share.own(tokens), share)
        language = share.mean(out.square().mean(-1) * share.own(weights))
        indexer = stage.loss()
        total = torch.stack([share.over_ranks(loss) for loss in (language, indexer)])
        (language + indexer).backward()
    return total, {n: ranks.sum(p.grad.flatten()) / ranks.size for n, p in model.named_parameters()}


def assert_close(found, expected):
    assert torch.allclose(found[0], expected[0], rtol=TOLERANCE, atol=0)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name


CASES = [(name, own_indexer) for name in STAGES for own_indexer in (False, True)]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_as_one_rank_does(size):
    """The same processes run CHECKS, because processes take seconds to start."""
    for (name, own_indexer), first, *others in zip(CASES, *in_ranks(size, of_a_rank), strict=True):
        assert_close(first, trained(name, ALONE, own_indexer))
        for total, gradients in others:
            assert torch.equal(total, first[0])
            assert all(torch.equal(gradient, first[1][name]) for name, gradient in gradients.items())


def of_a_rank(ranks):
    for check in CHECKS[ranks.size]:
        check(ranks)
    return [trained(name, ranks, own_indexer) for name, own_indexer in CASES]


def check_documented_loop(ranks):
    """Check that the FSDP2 loop in docs/how-to/train-an-indexer.md has the losses of one rank in each stage."""
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "train-an-indexer.md").read_text()
    (code,) = re.findall(r"## On several GPUs\n.*?```python\n(.*?)```", text, re.S)
    assert 'IndexerStage(model, "sparse")' in code
    for name in STAGES:
        of_stage, alone, shared = code.replace('"sparse"', f'"{name}"'), {}, {}
        exec(of_stage, alone)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "started_ranks", lambda: ranks.size)
            patch.setattr(parallel_ranks, "join", lambda kind: (ranks, torch.device(kind)))
            exec(of_stage, shared)
        assert shared["share"].ranks.size == 2 and alone["share"].ranks.size == 1
        assert shared["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)


def check_checkpointed_layers(ranks):
    """Check that gradients agree if the backward pass recomputes the layers, and so gathers the keys again."""
    assert_close(trained("sparse", ranks, checkpointed=True), trained("sparse", ranks))


def check_gradients_of_gathered_rows(ranks):
    """Check the gathered rows. Backward adds the ranks' bf16 gradients in fp32 in the ranks' order and rounds once."""
    stage = IndexerStage(Small(TOP_K), "sparse")
    share = stage.share([9, 4], ranks)
    every = torch.arange(13.0)[:, None].expand(13, 3)
    x = share.own(every).bfloat16().requires_grad_()
    with stage:
        keys = share.gather(x)
    begins = {0: 0, 1: 9}
    pieces = share.shares[ranks.rank].pieces
    assert torch.equal(keys.float(), torch.cat([every[begins[p.sequence] :][: p.end] for p in pieces]))
    keys.backward(torch.full_like(keys, 1.0 + ranks.rank / 64))
    total = torch.zeros(13)
    for rank, other in enumerate(share.shares):
        part = torch.zeros(13)
        for p in other.pieces:
            part[begins[p.sequence] :][: p.end] += 1.0 + rank / 64
        total += part.bfloat16().float()
    assert torch.equal(x.grad[:, 1], share.own(total).bfloat16())


def check_wrong_lengths(ranks):
    """Check that all ranks raise if lengths differ or are wrong on one rank, and can share tokens afterwards."""
    stage, rank = IndexerStage(Small(TOP_K), "warmup"), ranks.rank
    same = r"must be the same on all ranks, got \(12, 3\) on rank 0 and \(12, 4\) on rank 1"
    for own, wrong_rank, message in [
        ([12, 3 + rank], None, same),
        ([3, 1 - rank], 1, r"every sequence needs .*, got \[3, 0\]"),
        ([(2.5, 2)[rank]], 0, r"must be an integer, got 2.5"),
        ([1], rank, r"must have at least a token for each of 2 ranks, got \[1\]"),
    ]:
        suffix = "" if wrong_rank in (None, rank) else rf" \(rank {wrong_rank}\)"
        with pytest.raises((ValueError, TypeError), match=rf"^(query_)?lens(\[0\])?: {message}{suffix}$"):
            stage.share(own, ranks)
    assert stage.share([2], ranks).query_lens == (1,)


def check_groups(ranks):
    """Check that each of two groups of two ranks trains as one rank does. A rank cannot use the other group."""
    groups, number = [dist.new_group([0, 1]), dist.new_group([2, 3])], ranks.rank // 2
    assert_close(trained("sparse", Ranks.of(groups[number])), trained("sparse", ALONE))
    with pytest.raises(ValueError, match=r"^group: this process must be one of its ranks"):
        Ranks.of(groups[1 - number])


CHECKS = {
    2: (check_documented_loop, check_checkpointed_layers, check_gradients_of_gathered_rows, check_wrong_lengths),
    4: (check_groups,),
}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_token_is_one_ranks_and_all_ranks_have_equal_work(size):
    for lens in ([1] * size, [5000], [1, 2, 3, 4, 5, 6, 7], [3000, 17, 900, 1, 1, 2222]):
        shares = cut(lens, size)
        found = sorted((p.sequence, t) for share in shares for p in share.pieces for t in range(p.begin, p.end))
        assert found == [(i, t) for i, length in enumerate(lens) for t in range(length)]
        counts = [share.tokens for share in shares]
        assert sum(counts) == sum(lens) and max(counts) - min(counts) <= 1
        work = [sum(t + 1 for p in share.pieces for t in range(p.begin, p.end)) for share in shares]
        if max(lens) > 1000:
            assert max(work) < 1.01 * min(work)


def test_wrong_uses_of_a_share_are_refused():
    model = Small(TOP_K)
    with pytest.raises(TypeError, match=r"^ranks: must be Ranks, got int$"):
        IndexerStage(model, "sparse").share([12, 3], 5)
    share = IndexerStage(model, "sparse").share([12, 3], ALONE)
    for call, x, message in [
        (share.own, torch.zeros(14), r"x: must have a row for each of 15 tokens, got shape \[14\]"),
        (share.gather, torch.zeros(1, 4), r"x: must have a row for each of this rank's 15 tokens, got shape \[1, 4\]"),
        (share.mean, torch.zeros(15, 1), r"values: must be \[15\], one of each of this rank's tokens, got \[15, 1\]"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}$"):
            call(x)
    told = r"^batch: a rank's share of tokens is for layers whose indexers are trained now"
    with pytest.raises(ValueError, match=told):
        model(torch.arange(15), share)
