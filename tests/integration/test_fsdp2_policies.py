"""What FSDP2 can be asked for, over two ranks: gradients leave early, and no bit depends on that."""

import pytest
import torch
from tests.support.rank_processes import Run, equal

AT_ONCE = {"speculation": "always"}
LATE = {"speculation": "never", "overlap": False}
MIXED = {"dtype": "float32", "casts": ["bfloat16", "float32"]}
SAME = {
    "kept after forward": {"reshard": False},
    "compiled": {"blocks": "compiled"},
    "recomputed": {"blocks": "recomputed"},
    "recomputed, re-entering": {"blocks": "recomputed, re-entering"},
}
POLICIES = {
    "fp32 in bf16": MIXED,
    "bf16, reduced in fp32": {"casts": [None, "float32"]},
    "accumulated": {"dtype": "float32", "accumulate": 2, "reshard": False},
    "all": {**MIXED, "accumulate": 2, "blocks": "compiled, recomputed"},
}


@pytest.fixture(scope="module")
def trained(daemons, tmp_path_factory):
    """Of each scenario, what both ranks had at the end."""
    scenarios = {"eager": {}, **SAME}
    for name, options in POLICIES.items():
        scenarios |= {f"{name}, early": {**options, **AT_ONCE}, f"{name}, late": {**options, **LATE}}
        if "dtype" in options:
            scenarios[f"{name}, of torch"] = {**options, "plain": True}
    results = Run(daemons, tmp_path_factory.mktemp("runs") / "run", *scenarios.values()).results()
    return {name: [of_rank[i] for of_rank in results] for i, name in enumerate(scenarios)}


@pytest.mark.parametrize("name", SAME)
def test_how_a_block_is_computed_changes_no_bit(trained, name):
    for result in trained[name]:
        equal(result, trained["eager"][0])
        assert result["early"] > 0


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_in_the_dtypes_of_a_policy_leave_early_and_change_no_bit(trained, name):
    for early, late in zip(trained[f"{name}, early"], trained[f"{name}, late"], strict=True):
        assert early["early"] > 0 == late["early"]
        equal(early, late)
        equal(early, trained[f"{name}, early"][0])


@pytest.mark.parametrize("name", [name for name, options in POLICIES.items() if "dtype" in options])
def test_weights_under_a_policy_are_those_of_torch(trained, name):
    ours, torchs = trained[f"{name}, early"][0], trained[f"{name}, of torch"][0]
    for parameter, weight in ours["weights"].items():
        torch.testing.assert_close(weight, torchs["weights"][parameter], atol=2e-6, rtol=1e-5, msg=parameter)
