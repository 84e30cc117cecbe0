"""A training loop that is made up from a seed: mostly the same in each step, with something else now and then."""

import copy
import random

import torch

EDITS = {
    "in place": lambda p: p.grad.mul_(0.5),
    "its data": lambda p: p.grad.data.mul_(0.5),
    "clamped": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "noise": lambda p: p.grad.add_(1e-3),
    "detached": lambda p: p.grad.detach().add_(1e-3),
    "a view": lambda p: p.grad.view(-1)[:].mul_(2),
    "written": lambda p: p.grad.data.copy_(torch.full_like(p.grad, 1e-3)),
    "zero": lambda p: p.grad.zero_(),
    "replaced": lambda p: setattr(p, "grad", p.grad * 0.25),
    "dropped": lambda p: setattr(p, "grad", None),
}
ZEROING = ["set to none"] * 3 + [
    "kept",
    "by the model",
    "kept by the model",
    "by hand",
    "none by hand",
    "decay",
    "never",
]
SOMETIMES = [
    "edit",
    "edit all",
    "clip",
    "evaluate",
    "freeze",
    "skip",
    "lr",
    "closure",
    "swap",
    "save",
    "load",
    "autograd",
]


class Net(torch.nn.Module):
    """Has two heads beside one that is tied, and a parameter of one element."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 48)
        self.first = torch.nn.Linear(48, 64)
        self.second = torch.nn.Linear(64, 48)
        self.norm = torch.nn.LayerNorm(48)
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.policy = torch.nn.Linear(48, 40)
        self.critic = torch.nn.Linear(48, 1)

    def loss(self, data, head):
        generator = torch.Generator().manual_seed(data)
        x = self.embedding(torch.randint(40, (3, 7), generator=generator))
        x = self.norm(x + self.second(torch.tanh(self.first(x)))) * self.gain
        if head == "critic":
            return (self.critic(x) - torch.randn(3, 7, 1, generator=generator)).square().mean()
        logits = self.policy(x) if head == "policy" else x @ self.embedding.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(40, (21,), generator=generator))


def actions(seed: int) -> list[tuple]:
    """What the loop does."""
    dice = random.Random(seed)
    parameters = len(list(Net().parameters()))
    heads = ["policy", "critic", "tied"]
    allowed = {*dice.sample(SOMETIMES, dice.randint(1, 6))}
    zeroing, backwards, head = dice.choice(ZEROING), dice.choice([1, 1, 1, 2, 3]), dice.choice(heads)
    always = {what: dice.random() < 0.4 for what in ("edit", "edit all", "clip")}
    how, which = dice.choice([*EDITS]), dice.randrange(parameters)
    done: list[tuple] = []
    for step in range(dice.randint(6, 14)):
        deviates = step > 0 and dice.random() < 0.35

        def may(what, chance, deviates=deviates):
            return what in allowed and (always.get(what, False) or (deviates and dice.random() < chance))

        for backward in range(dice.randint(0, 3) if deviates and dice.random() < 0.3 else backwards):
            of = dice.choice(heads) if deviates and dice.random() < 0.5 else head
            done.append(("backward", 100 * step + backward, of))
        if "evaluate" in allowed:
            done.append(("evaluate", dice.randrange(1000), dice.choice(heads)))
        if may("edit", 0.5):
            done.append(("edit", which, how) if always["edit"] else ("edit", dice.randrange(parameters), how))
        if may("edit all", 0.3):
            done.append(("edit all", how if always["edit all"] else dice.choice([*EDITS])))
        if may("clip", 0.4):
            done.append(("clip", dice.choice([0.1, 0.5, 10.0])))
        if "edit" in allowed and deviates and dice.random() < 0.15:
            done.append(("edit", dice.randrange(parameters), dice.choice([*EDITS])))
        if may("autograd", 0.3):
            done.append(("autograd", 100 * step + 50))
        if may("swap", 0.5):
            done.append(("swap", dice.randrange(1000)))
        if not may("skip", 0.5):
            done.append(("closure", 100 * step + 70) if may("closure", 0.3) else ("step",))
        if may("lr", 0.5):
            done.append(("lr", dice.choice([1e-2, 3e-3, 0.0])))
        done.append(("zero", zeroing if zeroing != "never" or dice.random() < 0.9 else "set to none"))
        if may("freeze", 0.5):
            done.append(("freeze", dice.randrange(parameters), dice.random() < 0.5))
        if may("save", 0.5):
            done.append(("save",))
        if may("load", 0.3):
            done.append(("load",))
    return done


class Loop:
    def __init__(self, seed, make) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.parameters = list(self.net.parameters())
        self.optimizer = make(self.net.parameters())
        self.saved = None

    def weights(self):
        return [parameter.detach().clone() for parameter in self.parameters]

    def do(self, what, *given):
        """Returns the tensors that the loop sees by it."""
        return getattr(self, what.replace(" ", "_"))(*given) or []

    def backward(self, data, head):
        loss = self.net.loss(data, head)
        if loss.requires_grad:
            loss.backward()
        return [loss.detach()]

    @torch.no_grad()
    def evaluate(self, data, head):
        return [self.net.loss(data, head)]

    def edit(self, which, how):
        if self.parameters[which].grad is not None:
            EDITS[how](self.parameters[which])

    def edit_all(self, how):
        for which in range(len(self.parameters)):
            self.edit(which, how)

    def clip(self, max_norm):
        if any(parameter.grad is not None for parameter in self.parameters):
            return [torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)]

    def autograd(self, data):
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        gradients = torch.autograd.grad(self.net.loss(data, "policy"), trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @torch.no_grad()
    def swap(self, data):
        own = self.weights()
        for parameter in self.parameters:
            parameter.mul_(0.5)
        loss = self.net.loss(data, "policy")
        for parameter, weight in zip(self.parameters, own, strict=True):
            parameter.copy_(weight)
        return [loss]

    def step(self):
        self.optimizer.step()
        return self.weights()

    def closure(self, data):
        def closure():
            self.optimizer.zero_grad()
            loss = self.net.loss(data, "policy")
            loss.backward()
            return loss

        return [self.optimizer.step(closure).detach(), *self.weights()]

    def lr(self, value):
        self.optimizer.param_groups[0]["lr"] = value

    def zero(self, how):
        if how in ("set to none", "kept"):
            self.optimizer.zero_grad(set_to_none=how == "set to none")
        elif how in ("by the model", "kept by the model"):
            self.net.zero_grad(set_to_none=how == "by the model")
        for parameter in self.parameters:
            if how == "none by hand":
                parameter.grad = None
            elif parameter.grad is not None and how == "by hand":
                parameter.grad.data.zero_()
            elif parameter.grad is not None and how == "decay":
                parameter.grad.mul_(0.5)

    def freeze(self, which, requires_grad):
        self.parameters[which].requires_grad_(requires_grad)

    def save(self):
        self.saved = copy.deepcopy(self.optimizer.state_dict()), self.weights()

    @torch.no_grad()
    def load(self):
        if self.saved is None:
            return None
        state, weights = self.saved
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)
        self.optimizer.load_state_dict(copy.deepcopy(state))
        return self.weights()
