"""State that is no checkpoint: a file of tensors that the safetensors library wrote, restored by the daemon."""

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

import superoffload.torch
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2 as pb

NAME = "restored"
STATUS = grpc.StatusCode


def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)).to(torch.bfloat16)


def optimizer_of(model, daemon, **arguments):
    return superoffload.torch.AdamW(model.named_parameters(), lr=1e-2, endpoint=daemon.endpoint, name=NAME, **arguments)


def train(model, optimizer, steps, unused=()):
    for seed in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        model(x).square().mean().backward()
        for parameter in unused:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained(daemon, tmp_path):
    """A detached optimizer after five steps, and a file of what it had after three, with a bias that had one."""
    model = build()
    optimizer = optimizer_of(model, daemon)
    train(model, optimizer, 1)
    train(model, optimizer, 2, unused=[model[1].bias])
    saved = {
        f"{'model' if array == 'master' else array}.{name}": tensor
        for name, arrays in optimizer.state_tensors().items()
        for array, tensor in arrays.items()
    }
    path = tmp_path / "state.safetensors"
    save_file({**saved, "steps.1.bias": torch.tensor(1)}, path)
    train(model, optimizer, 2)
    optimizer.close()
    control = Connection(daemon.endpoint)
    yield model, control, path
    control.close()


def request_of(path, **changes):
    file = pb.TensorFile(path=str(path), committed_steps=3)
    return pb.RestoreOptimizerRequest(**{"name": NAME, "files": [file], **changes})


def tensors_of(optimizer):
    return {(name, array): t for name, arrays in optimizer.state_tensors().items() for array, t in arrays.items()}


def test_tensors_and_steps_become_those_of_the_file_and_hyper_parameters_stay(trained, daemon):
    model, control, path = trained
    optimizer = optimizer_of(model, daemon)
    optimizer.param_groups[0]["lr"] = 0.25
    train(model, optimizer, 1)
    optimizer.close()
    control.call("RestoreOptimizer", request_of(path))
    restored = control.get_whole(NAME)
    assert restored.committed_steps == 3
    assert {scalar.name: scalar.value for scalar in restored.groups[0].scalars}["lr"] == 0.25
    model = build()
    optimizer = optimizer_of(model, daemon, sync="pull_params")
    saved = load_file(path)
    for (name, array), tensor in tensors_of(optimizer).items():
        assert torch.equal(tensor, saved[f"{'model' if array == 'master' else array}.{name}"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), saved[f"model.{name}"].to(torch.bfloat16))
        assert optimizer.state[parameter]["step"] == (1 if name == "1.bias" else 3)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"files": []}, STATUS.INVALID_ARGUMENT, "directories is empty"),
        ({"files": [pb.TensorFile(path="state.safetensors")]}, STATUS.INVALID_ARGUMENT, "absolute path"),
        ({"files": [pb.TensorFile(path="/nowhere/state.safetensors")]}, STATUS.NOT_FOUND, "/nowhere"),
    ],
)
def test_a_request_that_cannot_be_is_refused(trained, changes, code, words):
    _, control, path = trained
    with pytest.raises(Error, match=words) as raised:
        control.call("RestoreOptimizer", request_of(path, **changes))
    assert raised.value.code == code


def test_what_contradicts_itself_is_refused_before_the_state_is_touched(trained, daemon, tmp_path):
    model, control, path = trained
    optimizer = optimizer_of(model, daemon)
    before = tensors_of(optimizer)
    optimizer.save_checkpoint(tmp_path / "ckpt")
    optimizer.close()
    whole = load_file(path)

    def refused(code, words, tensors=whole, **changes):
        other = tmp_path / "other.safetensors"
        save_file(tensors, other)
        with pytest.raises(Error, match=words) as raised:
            control.call("RestoreOptimizer", request_of(other, **changes))
        assert raised.value.code == code

    missing = {name: tensor for name, tensor in whole.items() if name != "exp_avg.0.bias"}
    refused(STATUS.FAILED_PRECONDITION, 'no tensor "exp_avg.0.bias"', missing)
    for name in ("model", "exp_avg"):
        narrow = {**whole, f"{name}.0.bias": whole[f"{name}.0.bias"].half()}
        refused(STATUS.FAILED_PRECONDITION, "is F16", narrow)
    refused(STATUS.INVALID_ARGUMENT, "but another is of step 5", directories=[str(tmp_path / "ckpt")])
    refused(STATUS.INVALID_ARGUMENT, '"steps.0.bias" is 4, but', {**whole, "steps.0.bias": torch.tensor(4)})
    refused(STATUS.INVALID_ARGUMENT, '"steps.0.bias" is 1844', {**whole, "steps.0.bias": torch.tensor(-1)})
    refused(STATUS.DATA_LOSS, '"steps.0.bias" is no single I64', {**whole, "steps.0.bias": torch.tensor([1, 2])})
    refused(STATUS.DATA_LOSS, '"steps.0.bias" is no single I64', {**whole, "steps.0.bias": torch.tensor(1.0)})
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-8])
    refused(STATUS.DATA_LOSS, "cut.safetensors", files=[pb.TensorFile(path=str(cut), committed_steps=3)])
    after = tensors_of(optimizer_of(model, daemon))
    assert all(torch.equal(before[key], after[key]) for key in before)
