"""What a script of torch.optim's shows, imports and compiles, and no more than that with our optimizer in it."""

import subprocess
import sys
import textwrap

import pytest


def run(code, *words, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        capture_output=True,
        text=True,
        timeout=300,
        **environment,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_importing_brings_nothing_slow_that_torch_has_not_brought():
    code = """
        import sys, torch
        slow = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers"}
        slow -= set(sys.modules)
        import superoffload.torch
        assert slow.isdisjoint(sys.modules), slow & set(sys.modules)
        """
    run(code)


TRAIN = """
    import torch
    import superoffload.torch
    model = torch.nn.Linear(8, 8)
    optimizer = superoffload.torch.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    """


def test_forks_print_nothing():
    code = """
    import os
    for _ in range(3):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    """
    (line,) = run(TRAIN + code).stderr.splitlines()
    assert "started a private superoffloadd" in line


@pytest.mark.parametrize("before", ["", "import grpc", "import os; os.environ['GRPC_ENABLE_FORK_SUPPORT'] = '1'"])
def test_grpcs_fork_support_is_the_users_where_the_user_has_one(before):
    code = """
    import os
    set_by_user = os.environ.get("GRPC_ENABLE_FORK_SUPPORT")
    import superoffload
    assert os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == set_by_user
    """
    run(before + textwrap.dedent(code))


def test_a_compiled_step_breaks_where_torchs_does_and_has_the_bits_of_one_that_is_not():
    code = """
        import torch
        import superoffload.torch
        from torch._dynamo.utils import counters

        def train(make, compiled, **options):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
            optimizer = make(model.parameters(), lr=1e-2, **options)

            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                return loss

            step = torch.compile(step, backend="eager") if compiled else step
            for i in range(5):
                step(torch.ones(2, 8) * (i + 1))
            return sum(counters["graph_break"].values()), [p.detach().clone() for p in model.parameters()]

        theirs, _ = train(torch.optim.AdamW, True)
        for overlap in ("auto", False):
            breaks, ours = train(superoffload.torch.AdamW, True, overlap=overlap)
            _, expected = train(superoffload.torch.AdamW, False, overlap=overlap)
            # One more is the call that clips: the daemon does.
            assert breaks <= theirs + 1, (breaks, theirs)
            assert all(map(torch.equal, ours, expected))
        """
    lines = run(code).stderr.splitlines()
    (ours,) = [line for line in lines if "superoffload" in line]
    assert "started a private superoffloadd" in ours
