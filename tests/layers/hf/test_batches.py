"""Padded sequences, and packed ones without a cache, have the logits that transformers computes for each alone."""

import copy

import pytest
import torch
from transformers import DynamicCache

from tests.layers.hf.pairs import padded
from tests.layers.models.parity import assert_same

LENS = [48, 5, 23]


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logits(models, tokens, side, positions):
    ids, mask = padded(tokens, LENS, side)
    position_ids = positions_of(mask) if positions else None
    got = models.ours(ids, attention_mask=mask, position_ids=position_ids).logits
    for b, n in enumerate(LENS):
        assert_same(got[b][mask[b].bool()], models.alone(tokens[b, :n]))


@torch.no_grad()
def test_a_row_of_a_pass_may_be_all_padding(models, tokens):
    ids, mask = padded(tokens, LENS, "left")
    mask[1] = 0
    cache = DynamicCache(config=models.ours.config)
    models.ours(ids, attention_mask=mask, position_ids=positions_of(mask), cache=cache)
    mask = torch.cat((mask, torch.tensor([[0], [1], [1]])), 1)
    new = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -1:], "cache": cache}
    got = models.ours(tokens[:, 60:61], **new).logits
    assert_same(got[1], models.alone(tokens[1, 60:61]))
    assert_same(got[2], models.alone(torch.cat((tokens[2, :23], tokens[2, 60:61])))[-1:])
    empty = models.ours(ids, attention_mask=torch.zeros_like(ids)).logits
    assert empty.isfinite().all()


@torch.no_grad()
def test_padding_may_stand_between_a_prompt_and_the_next_token(models, tokens):
    ids, mask = padded(tokens, LENS, "right")
    cache = DynamicCache(config=models.ours.config)
    models.ours(ids, attention_mask=mask, position_ids=positions_of(mask), cache=cache)
    mask = torch.cat((mask, torch.ones(3, 2, dtype=torch.int64)), 1)
    new = {"attention_mask": mask, "position_ids": positions_of(mask)[:, -2:], "cache": cache}
    got = models.ours(torch.stack([tokens[b, n : n + 2] for b, n in enumerate(LENS)]), **new).logits
    for b, n in enumerate(LENS):
        assert_same(got[b], models.alone(tokens[b, : n + 2])[-2:])


def test_greedy_tokens_after_padded_prompts_are_the_same(models, tokens):
    ids, mask = padded(tokens, LENS, "left")
    options = {"max_new_tokens": 12, "do_sample": False}
    got = models.ours.generate(ids, attention_mask=mask, **options)
    for b, n in enumerate(LENS):
        alone = tokens[b : b + 1, :n]
        expected = models.theirs.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert got[b, 48:].tolist() == expected[0, n:].tolist()


@pytest.mark.parametrize("frozen", [False, True])
def test_positions_that_begin_again_separate_sequences_without_a_cache(models, tokens, frozen):
    lens = [12, 1, 8]
    ids, positions = tokens[:, :21], torch.cat([torch.arange(n) for n in lens])[None]
    ours = copy.deepcopy(models.ours)
    if frozen:
        ours.requires_grad_(False)
        ours.model.layers[-1].requires_grad_(True)
    separated = torch.stack([torch.cat([models.alone(part) for part in row.split(lens)]) for row in ids])
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            got = ours(ids, position_ids=positions, use_cache=False).logits
            assert got.requires_grad == with_gradients
            assert_same(got.detach(), separated)
            if ours.config.model_type == "deepseek_v4":
                with pytest.raises(ValueError, match=r"position_ids: must be consecutive.*need use_cache=False"):
                    ours(ids, position_ids=positions)
            else:
                together = models.theirs(ids, position_ids=positions).logits.detach()
                for n in (1, 2, 3):
                    assert (together - separated)[:n].abs().max() > 0.05
                    assert_same(ours(ids[:n], position_ids=positions).logits.detach(), together[:n])
