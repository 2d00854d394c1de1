"""Tokens drawn by random numbers: by evenly spaced ones, so that a token comes as often as its probability says."""

import pytest
import torch

from dsa_layers.generation.sampler import draw, draw_of_likeliest, random_numbers

COUNT = 5000
NUMBERS = (torch.arange(COUNT, dtype=torch.float64)[:, None] + 0.5) / COUNT


def settings(logits, temperature, top_k, top_p):
    """The arguments of `draw_of_likeliest`, of which `draw` takes the first four."""
    each = [torch.full((COUNT, 1), value, dtype=torch.float64) for value in (temperature, top_k, top_p, 0)]
    rows = logits.repeat(COUNT, 1)
    return rows, rows.amax(-1, keepdim=True), each[0], NUMBERS, each[1].long(), *each[2:], top_k


def probabilities(logits, temperature, top_k, top_p):
    """By the definition: of equals the lowest token id comes first."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    likely = torch.softmax(logits[order].double() / temperature, 0)
    kept = [i for i in range(len(order)) if likely[:i].sum() < top_p]
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[torch.tensor(order)[kept]] = likely[kept] / likely[kept].sum()
    return result


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(40, 1.0), (40, 0.9), (40, 0.33), (7, 1.0), (7, 0.8), (1, 1.0), (40, 1e-9)]
)
def test_a_token_comes_as_often_as_its_probability_says(temperature, top_k, top_p):
    """Of logits that are often equal, also at the end of what is kept, and one of minus infinity."""
    logits = (torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2).round()
    logits[3] = -torch.inf
    given = settings(logits, temperature, top_k, top_p)
    expected = probabilities(logits, temperature, top_k, top_p)
    drawn = [draw_of_likeliest(*given)]
    if (top_k, top_p) == (40, 1.0):
        drawn.append(draw(*given[:4]))
    for tokens in drawn:
        often = torch.bincount(tokens[:, 0], minlength=40)
        assert (often - COUNT * expected).abs().max() < 1.01 and often[expected == 0].sum() == 0


def test_a_row_depends_on_no_other():
    """Beside rows that keep more tokens, and such that are not finite."""
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(2))
    top_k = torch.arange(1, 65)[:, None] * 40
    top_p, temperature, numbers = torch.rand(3, 64, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits[5, 7], logits[6, 8], logits[7] = torch.nan, torch.inf, -torch.inf
    rows = logits, logits.amax(-1, keepdim=True), temperature + 0.1, numbers
    likeliest, any_token = draw_of_likeliest(*rows, top_k, top_p, 0 * top_p, 2560), draw(*rows)
    for i in (0, 1, 4, 8, 30, 63):
        row = [each[i : i + 1] for each in (*rows, top_k, top_p, 0 * top_p)]
        assert likeliest[i] == draw_of_likeliest(*row, int(top_k[i])) == draw_of_likeliest(*row, 3001)
        assert any_token[i] == draw(*row[:4])


def test_the_largest_number_draws_a_token():
    """Of a large vocabulary, whose sums have more bits than the number."""
    logits = torch.zeros(1, 129280)
    one = torch.ones(1, 1, dtype=torch.float64)
    rows = logits, logits.amax(-1, keepdim=True), one, one - 2**-53
    assert draw(*rows) == draw_of_likeliest(*rows, torch.tensor([[129280]]), one, 0 * one, 129280) == 129279


def test_a_random_number_depends_on_seed_and_position_only():
    numbers = random_numbers(3, range(10, 1010))
    assert random_numbers(3, [12, 10]) == [numbers[2], numbers[0]] and len({*numbers}) == 1000
    others = random_numbers(4, range(10, 1010))
    assert all(abs(sum(each) / 1000 - 0.5) < 0.05 and 0 <= min(each) and max(each) < 1 for each in (numbers, others))
    assert abs(sum((x - 0.5) * (y - 0.5) for x, y in zip(numbers, others))) < 10
