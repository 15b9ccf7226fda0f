"""torch's private names for scaling and for instruments exist, and do what precision/torch_private.py says."""

import inspect
import logging
import math
import sys

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes.modules.torch_private import SEEN_IN
from amp_recipes.precision import torch_private

WHERE = f"private names of torch were seen in {' and '.join(SEEN_IN)}, and this is {torch.__version__}"


def test_kernels_over_lists():
    tensors, others = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)]
    torch_private.foreach_copy(others, tensors)
    torch_private.foreach_mul(others, 2.0)
    torch_private.foreach_mul(others, torch.tensor(2.0))
    assert torch_private.flatten(others).tolist() == [4.0] * 5, WHERE
    assert [norm.item() for norm in torch_private.foreach_norm(tensors)] == [
        pytest.approx(math.sqrt(2)),
        pytest.approx(math.sqrt(3)),
    ], WHERE


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_unscaling_raises_the_flag_for_what_is_not_finite(bad):
    flag, half = torch.zeros(()), torch.full((), 0.5)
    numbers = [torch.tensor([2.0, 4.0])]
    torch_private.unscale_and_check(numbers, flag, half)
    assert numbers[0].tolist() == [1.0, 2.0] and flag.item() == 0.0, WHERE
    torch_private.unscale_and_check([torch.tensor([1.0, bad])], flag, half)
    assert flag.item() == 1.0, WHERE


def test_insides_of_the_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_private.current_scale(scaler) is None and torch_private.scaler_is_on(scaler), WHERE
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    assert torch_private.current_scale(scaler).item() == 8.0, WHERE
    scaler.unscale_(optimizer)
    state = torch_private.rounds_of(scaler)[id(optimizer)]
    assert state["stage"] is OptState.UNSCALED and len(state["found_inf_per_device"]) == 1, WHERE
    torch_private.switch_scaler(scaler, False)
    assert not scaler.is_enabled() and torch_private.current_scale(scaler).item() == 8.0, WHERE


def test_methods_that_are_overridden_have_these_parameters():
    unscale = inspect.signature(torch.amp.GradScaler._unscale_grads_)
    assert list(unscale.parameters) == ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"], WHERE
    assert TorchDispatchMode._should_skip_dynamo() in (True, False), WHERE


def test_which_optimizers_take_the_verdict_on_the_device():
    parameters = [nn.Parameter(torch.ones(1))]
    name = torch_private.STEP_TAKES_FOUND_INF
    assert getattr(torch.optim.AdamW(parameters, fused=True), name, False), WHERE
    assert not getattr(torch.optim.AdamW(parameters), name, False), WHERE
    assert not getattr(torch.optim.Rprop(parameters), name, False), WHERE


class Seeing(torch_private.DispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return torch_private.kernel_of(func)(*args, **(kwargs or {}))


def test_what_an_instrument_sees_of_an_op():
    x = torch.ones(2)
    with Seeing() as seeing:
        x.add_(1)
        with torch_private.without_modes():
            x.add_(1)
    (op,) = seeing.ops
    assert isinstance(op, torch_private.Op), WHERE
    assert torch_private.bare_op_name(op) == "add_" and torch_private.schema_of(op).name == "aten::add_", WHERE
    assert torch_private.schema_of(op).is_mutable, WHERE
    with pytest.raises(AttributeError):
        torch_private.kernel_of(torch.ops.higher_order.cond)


def test_calls_that_torch_function_does_not_see():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("was seen")

    with torch_private.without_torch_function():
        assert torch.ones(1).as_subclass(Loud).sum().ndim == 0, WHERE


def test_wrappers_are_known():
    assert not torch_private.is_wrapper(torch.ones(1)), WHERE
    assert torch_private.is_wrapper(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)), WHERE


def test_fake_tensors_compute_shapes():
    with torch_private.fake_tensor_mode():
        assert torch.empty(2**20, 2**20).T.shape == (2**20, 2**20), WHERE
    assert torch_private.FAKE_TENSOR_LOG in logging.root.manager.loggerDict, WHERE


def test_what_the_dispatcher_tells():
    names = torch_private.all_op_names()
    assert "aten::mm" in names, WHERE
    assert torch_private.has_kernel("aten::mm", "AutocastCPU"), WHERE
    assert not torch_private.has_kernel("aten::relu", "AutocastCPU"), WHERE
    assert torch_private.is_dispatch_key("AutocastCUDA") and not torch_private.is_dispatch_key("AutocastToaster"), WHERE


def test_what_autograd_tells():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch_private.users_function(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            frame, codes = sys._getframe(0), []
            while frame is not None:
                codes.append(frame.f_code)
                frame = frame.f_back
            seen.extend([torch_private.graph_task(), torch_private.running_node(), codes])
            return grad

    assert torch_private.graph_task() == -1 and torch_private.running_node() is None, WHERE
    x = torch.ones(1, requires_grad=True)
    number = torch_private.next_node_number()
    y = Noting.apply(x)
    assert torch_private.next_node_number() == number + 1, WHERE
    assert torch_private.node_number(y.grad_fn) == number, WHERE
    assert torch_private.node_number(y.grad_fn.next_functions[0][0]) == 2**64 - 1, WHERE
    y.backward()
    function, task, node, codes = seen
    assert function is Noting and task >= 0 and node is y.grad_fn, WHERE
    assert torch_private.BACKWARD_CODE in codes, WHERE


def test_a_backward_begins_with_a_gradient_of_torchs_own():
    names = []

    class Where(torch_private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            frame = sys._getframe(0)
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            return func(*args, **(kwargs or {}))

    y = torch.ones((), requires_grad=True) * 2
    with Where():
        y.backward()
    assert torch_private.FIRST_GRADIENTS in names, WHERE


def test_a_storage_that_is_held_weakly():
    tensor = torch.ones(4)
    address = torch_private.weak_storage(tensor)
    assert address == torch_private.weak_storage(tensor[1:]), WHERE
    for _ in range(2):
        torch_private.free_weak_storage(address)
    with pytest.raises(RuntimeError):
        torch_private.weak_storage(tensor.to_sparse())


def test_the_frames_of_the_compiler_around_a_function():
    function = torch._compile._disable_dynamo(lambda: sys._getframe(1).f_code)
    names, files = torch_private.COMPILER_FRAMES
    code = function()
    assert code.co_name in names and code.co_filename.endswith(files), WHERE
