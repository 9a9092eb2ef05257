import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cavesson.models.load import FastLinear, use_fast_linear
from cavesson.ops.linear import linear


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def gradients(function, x: Tensor, weight: Tensor, outer: Tensor) -> list[Tensor]:
    x.grad = weight.grad = None
    (function(x, weight) * outer).sum().backward()
    return [x.grad, weight.grad]


@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 7), (2, 3, 7), (2, 3, 4, 7), (0, 7), (2, 0, 7)])
def test_value_and_gradients_are_those_of_torch(shape):
    x, weight = leaf(*shape), leaf(6, 7)
    torch.testing.assert_close(linear(x, weight), functional.linear(x, weight))
    outer = torch.randn(*shape[:-1], 6)
    torch.testing.assert_close(gradients(linear, x, weight, outer), gradients(functional.linear, x, weight, outer))


def test_memory_layout_does_not_matter():
    x, weight = leaf(7, 3, 5), leaf(7, 6)
    outer = torch.randn(6, 3, 5).permute(2, 1, 0)

    def turned(function):
        return lambda x, weight: function(x.permute(2, 1, 0), weight.t())

    assert not x.permute(2, 1, 0).is_contiguous()
    torch.testing.assert_close(
        gradients(turned(linear), x, weight, outer), gradients(turned(functional.linear), x, weight, outer)
    )


def test_an_expanded_gradient_is_a_gradient():
    # The gradient of a plain sum has stride 0.
    x, weight = leaf(4, 7), leaf(6, 7)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(4, 7))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(6, 7))


@pytest.mark.parametrize("learns", ["x", "weight"])
def test_only_what_learns_gets_a_gradient(learns):
    x, weight = torch.randn(4, 7), torch.randn(6, 7)
    (x if learns == "x" else weight).requires_grad_()
    linear(x, weight).sum().backward()
    assert (x.grad is None) == (learns != "x")
    assert (weight.grad is None) == (learns != "weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_numbers_take_the_plain_product(dtype):
    x, weight = torch.randn(4, 7, dtype=dtype), torch.randn(6, 7, dtype=dtype)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))


def test_large_layers_change_class_and_keep_weights_and_results():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
    x = torch.randn(3, 256)
    before, weights = model(x), dict(model.state_dict())
    use_fast_linear(model)
    assert [type(layer) for layer in model] == [FastLinear, torch.nn.Linear]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), before)


def test_a_layer_without_bias_stays_without():
    layer = torch.nn.Linear(256, 256, bias=False)
    x = torch.randn(2, 256)
    expected = layer(x)
    use_fast_linear(layer)
    assert type(layer) is FastLinear
    torch.testing.assert_close(layer(x), expected)
