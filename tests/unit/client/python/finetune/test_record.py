"""At which step a run goes on."""

import torch

from superoffload.finetune import recipe
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.record import Record

ALONE = Ranks(0, 1, torch.device("cpu"), on_gpu=False)


def test_steps_that_were_skipped_are_not_taken_again(tmp_path):
    made = recipe.Recipe(model="m", data="d", output=str(tmp_path / "run"))
    record = Record.open(tmp_path / "run", made, ALONE)
    committed = 0
    for step in range(7):
        assert record.step_after(committed) == step
        skipped = step in (0, 3, 4, 6)
        record.add({"step": step}, skipped)
        committed += not skipped
    again = Record.open(tmp_path / "run", made, ALONE)
    assert [again.step_after(done) for done in range(4)] == [1, 2, 5, 7]
    assert [entry["step"] for entry in again.entries] == list(range(7))


def test_a_line_that_was_not_written_whole_is_written_again(tmp_path):
    made = recipe.Recipe(model="m", data="d", output=str(tmp_path / "run"))
    record = Record.open(tmp_path / "run", made, ALONE)
    record.add({"step": 0}, False)
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    again = Record.open(tmp_path / "run", made, ALONE)
    again.begin_log()
    again.add({"step": 1}, False)
    assert [entry["step"] for entry in Record.open(tmp_path / "run", made, ALONE).entries] == [0, 1]
