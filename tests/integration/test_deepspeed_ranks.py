"""Engines of two ranks: ZeRO's stages, sequences that ranks share, and checkpoints for another number of ranks."""

import pytest
import torch
from tests.support import process_group
from tests.support.deepspeed_trainer import ROWS, STEPS, llama, rows
from tests.support.rank_processes import Run, equal
from tests.unit.client.python.deepspeed.test_config import published

from superoffload import deepspeed

BF16 = {"bf16": {"enabled": True}}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


CONFIGS = {
    "0": {},
    "1": zero(1),
    "2": zero(2),
    "3": zero(3),
    "3, clipped": {**zero(3), "gradient_clipping": 0.05},
    "3, passes": {**zero(3), "gradient_accumulation_steps": 2},
    "3, in bf16": {**zero(3), **BF16},
    "3, reduced in bf16": {**zero(3), "communication_data_type": "bf16"},
    "1, sums": {**zero(1), "gradient_allreduce_op": "sum"},
    "3, in fp16": {**zero(3), "fp16": {"enabled": True, "initial_scale_power": 6}},
    "published": published("seed-oss-36b", "superoffload"),
    "shared sequences": {**zero(3), "sequence_parallel_size": 2},
}


@pytest.fixture(scope="module")
def trained(daemons, tmp_path_factory):
    """Of each configuration, what both ranks had at the end."""
    directory = tmp_path_factory.mktemp("runs")
    scenarios: list[dict] = [{"config": config} for config in CONFIGS.values()]
    apart = {"gradient_accumulation_steps": 2, "managed_gradient_accumulation": False}
    scenarios.append({"config": {**zero(1), **apart}, "no_sync": True})
    tied = {"config": CONFIGS["3"], "model": {"tie_word_embeddings": True}}
    scenarios.append({**tied, "save": str(directory / "tied")})
    scenarios.append({**tied, "load": str(directory / "tied")})
    gathers = zero(3, stage3_gather_16bit_weights_on_model_save=True)
    last = {"config": {**gathers, **BF16}, "save": str(directory / "saved"), "export": str(directory / "exported")}
    first, second = Run(daemons, directory / "run", *scenarios, last, trainer="deepspeed_trainer").results()
    names = [*CONFIGS, "no sync", "tied", "tied, loaded", "saved"]
    return dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True)), directory


@pytest.fixture(scope="module")
def whole():
    """Losses and weights of one process that has the rows of both, with torch's AdamW."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=rows(step), labels=rows(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def close(found, expected, tolerance=2e-4):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=0, atol=tolerance, msg=f"{name}: {{}}".format)


def test_stages_compute_the_same(trained, whole):
    first, second, _ = trained
    for name in ("0", "1", "2"):
        equal(first[name], first["3"])
    close(first["3"]["weights"], whole[1])
    means = [(here + there) / 2 for here, there in zip(first["3"]["losses"], second["3"]["losses"], strict=True)]
    assert means == pytest.approx(whole[0], rel=1e-4)
    assert first["3"]["norms"] == second["3"]["norms"]
    assert second["3"]["weights"] == {}


def test_passes_halves_and_clipping(trained, whole):
    first, _, _ = trained
    close(first["3, passes"]["weights"], whole[1])
    assert first["3, clipped"]["norms"][0] == first["3"]["norms"][0]
    with pytest.raises(AssertionError):
        close(first["3, clipped"]["weights"], whole[1])
    for name in ("3, in bf16", "3, reduced in bf16", "3, in fp16"):
        assert first[name]["losses"] == pytest.approx(first["3"]["losses"], rel=2e-2)
        for parameter, tensor in first["3"]["weights"].items():
            assert (first[name]["weights"][parameter].float() - tensor).abs().mean() < 4e-3, (
                parameter
            )  # steps of 1e-2; bf16 rounds 1 to 4e-3
    assert first["3, in bf16"]["weights"]["lm_head.weight"].dtype == torch.bfloat16
    equal(first["published"], first["3, in bf16"])
    assert first["3, reduced in bf16"]["norms"] == pytest.approx(first["3"]["norms"], rel=1e-2)
    assert first["3, reduced in bf16"]["norms"] != first["3"]["norms"]
    assert first["3, in fp16"]["norms"][0] == pytest.approx(first["3"]["norms"][0], rel=1e-2)


def test_passes_without_an_exchange_are_added_up(trained, whole):
    first, _, _ = trained
    close(first["no sync"]["weights"], whole[1])


def test_tied_weights_are_gathered_once_and_each_rank_has_its_clients_state(trained):
    for rank, of_rank in enumerate(trained[:2]):
        assert of_rank["tied, loaded"]["begun"] == STEPS
        assert of_rank["tied, loaded"]["loaded"][1] == {"saved_by": rank}
    weights = trained[0]["tied"]["weights"]
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    equal(trained[0]["tied, loaded"], trained[0]["tied"])


def test_gradients_are_summed_where_the_configuration_says_so(trained):
    first, _, _ = trained
    assert first["1, sums"]["norms"][0] == pytest.approx(2 * first["1"]["norms"][0], rel=1e-6)
    assert first["1, sums"]["losses"] == pytest.approx(first["1"]["losses"], rel=1e-3)  # little changes in AdamW


def test_ranks_that_share_sequences_have_one_loss(trained, whole):
    first, second, _ = trained
    assert first["shared sequences"]["losses"] == second["shared sequences"]["losses"]
    assert first["shared sequences"]["losses"] == pytest.approx(whole[0], rel=1e-4)
    close(first["shared sequences"]["weights"], whole[1], 5e-4)


def test_the_model_is_gathered_on_rank_0(trained):
    first, second, _ = trained
    assert first["saved"]["exported"] and second["saved"]["exported"]
    equal({"weights": first["saved"]["file"]}, first["saved"])


def test_another_number_of_ranks_goes_on(trained, daemons, tmp_path):
    first, _, directory = trained
    config = {**zero(2), **BF16}
    again = {"config": config, "load": str(directory / "saved"), "steps": STEPS}
    (here,), (there,) = Run(daemons, tmp_path / "two", again, trainer="deepspeed_trainer").results()
    assert here["begun"] == there["begun"] == STEPS
    equal(here, first["saved"])
    try:
        engine = deepspeed.initialize(
            model=llama(),
            config={"train_batch_size": ROWS, **BF16, "optimizer": {"type": "AdamW"}},
            optimizer_options={"endpoint": daemons[0].endpoint},
        )[0]
        assert engine.load_checkpoint(str(directory / "saved"))[1] == {"saved_by": 0}
        equal({"weights": engine.module.state_dict()}, first["saved"])
        engine.destroy()
    finally:
        process_group.leave()
