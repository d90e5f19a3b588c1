"""The operations that compiled layers with adapters call: what the compiler is told of them is true."""

import pytest
import torch

from whet.adapters import product


@pytest.mark.parametrize("rows", [1, 8, 30, 60])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_are_as_the_compiler_expects_them(rows, biased):
    torch.manual_seed(0)
    flat, weight, low, b = (torch.randn(shape) for shape in ((rows, 16), (12, 16), (rows, 4), (12, 4)))
    bias = torch.randn(12) if biased else None
    arguments = (flat, weight, bias, low, b, 0.5, True)
    torch.library.opcheck(
        torch.ops.whet.lora_output.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    expected = flat @ weight.T + 0.5 * low @ b.T + (0 if bias is None else bias)
    torch.testing.assert_close(product.lora_output(*arguments), expected)


def test_gradients_are_as_the_compiler_expects_them():
    torch.manual_seed(0)
    low, a, grads, weights = (
        torch.randn(5, 4),
        torch.randn(4, 16),
        [torch.randn(5, 12)] * 2,
        [torch.randn(12, 16)] * 2,
    )
    torch.library.opcheck(
        torch.ops.whet.lora_input_gradient.default,
        (low, a, grads, weights),
        test_utils=("test_schema", "test_faketensor"),
    )
    expected = low @ a + 2 * grads[0] @ weights[0]
    torch.testing.assert_close(product.lora_input_gradient(low, a, grads, weights), expected)
