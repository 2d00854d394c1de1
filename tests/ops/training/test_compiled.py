"""An op with gradients of its own under torch.compile, whose graphs end before it and go on behind it."""

import torch

import dsa


def test_a_compiled_function_has_the_same_results_and_gradients():
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((5, 3, 8), (7, 1, 8))]
    indices = torch.randint(-1, 7, (5, 1, 4), dtype=torch.int32)

    def loss(q, kv):
        out, lse = dsa.sparse_mla_attention(2 * q, kv, indices, 0.3, 4)
        return out.square().sum() + lse.sin().sum()

    expected, got = loss(*inputs), torch.compile(loss, backend="eager")(*inputs)
    torch.testing.assert_close(got, expected)
    for a, b in zip(*(torch.autograd.grad(x, inputs) for x in (got, expected))):
        torch.testing.assert_close(a, b)
