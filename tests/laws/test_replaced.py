"""Parameters of the model that somebody replaced after the optimizer was made: exact, or an error that names one."""

import pytest
import torch
from test_written import started
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.flat.tensors import digest
from steps import step_on
from zoo import SCHEMES, batch

NAMES = ["full", "demo-sign", "diloco", "none"]


def advance(model, optimizer, steps, overlap=False):
    for step in steps:
        step_on(optimizer, model(batch(0, step, 32)).mean(), overlap)
        optimizer.zero_grad()


def assign(model):
    state = {name: tensor.clone() for name, tensor in model.layers[1].state_dict().items()}
    model.layers[1].load_state_dict(state, assign=True)


def replace(model):
    model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach().clone())


def normalise(model):
    weight_norm(model.layers[1])


def assign_frozen(model):
    """In `started` the other one of its layer is frozen."""
    state = {name: tensor.clone() for name, tensor in model.layers[0].state_dict().items()}
    frozen, trained = model.layers[0].bias, model.layers[0].weight
    model.layers[0].load_state_dict(state, assign=True)
    model.layers[0].weight = trained
    assert not frozen.requires_grad and model.layers[0].bias is not frozen


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("act", [assign, replace, normalise, assign_frozen])
@pytest.mark.parametrize("name", NAMES)
def test_law_15_a_parameter_that_was_replaced_is_named_at_the_next_step(name, act, overlap):
    model, optimizer = started(LoopbackCommunicator(2), SCHEMES[name])
    advance(model, optimizer, range(2), overlap)
    act(model)
    with pytest.raises(ValueError, match=r"layers\.\d\.\w+ of the model is a new parameter"):
        advance(model, optimizer, [2], overlap)


class Same(nn.Module):
    """Moves a parameter to another name, and changes nothing."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_only_moved_to_another_module_goes_on(name):
    digests = []
    for moves in (False, True):
        model, optimizer = started(LoopbackCommunicator(2), SCHEMES[name])
        advance(model, optimizer, range(2))
        parameters = [*model.parameters()]
        if moves:
            register_parametrization(model.layers[1], "weight", Same())
            assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
        advance(model, optimizer, range(2, 4))
        digests.append(digest(parameters))
    assert digests[0] == digests[1]


def data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def swapped(model):
    """As `load_state_dict` and `to` do under `set_swap_module_params_on_conversion`."""
    for parameter in model.parameters():
        torch.utils.swap_tensors(
            parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        )


@pytest.mark.parametrize("act", [data, swapped])
@pytest.mark.parametrize("name", NAMES)
def test_law_15_weights_in_other_memory_train_as_before(name, act):
    digests = []
    for moves in (False, True):
        model, optimizer = started(LoopbackCommunicator(2), SCHEMES[name], dt.SignSGD)
        for step in range(4):
            advance(model, optimizer, [step])
            if moves:
                act(model)
        digests.append(digest(model.parameters()))
    assert digests[0] == digests[1]
