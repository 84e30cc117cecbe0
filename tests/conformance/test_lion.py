"""Lion is the Lion of its paper: a plain fp32 loop over its formula moves parameters alike."""

import torch
from tests.support.loops import batch, loop_daemon, net, ours, ours_on_host  # noqa: F401

LR, BETAS, WEIGHT_DECAY = 1e-2, (0.9, 0.99), 0.1


class PaperLion(torch.optim.Optimizer):
    """Program 1 of Chen et al. 2023."""

    def __init__(self, params, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def frozen_now_and_then(make):
    model = net()
    optimizer = make(model.parameters())
    for step in range(24):
        model[0].requires_grad_(step // 4 % 2 == 0)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]


def test_lion_moves_parameters_as_its_paper_says(ours):  # noqa: F811
    def lion(params):
        return ours(params, kind="Lion", lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)

    expected = [tensor.clone() for tensor in frozen_now_and_then(PaperLion)]
    actual = [tensor.clone() for tensor in frozen_now_and_then(lion)]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_lion_goes_through_a_checkpoint(ours_on_host, tmp_path):  # noqa: F811
    def train(restore):
        model = net()
        optimizer = ours_on_host(model.parameters(), kind="Lion", weight_decay=WEIGHT_DECAY)
        for step in range(12):
            if step == 6 and restore:
                optimizer.save_checkpoint(tmp_path / "six")
                for _ in range(2):
                    model(batch(0)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.restore_checkpoint(tmp_path / "six")
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(train(restore=True), train(restore=False), strict=True):
        assert torch.equal(a, b)
