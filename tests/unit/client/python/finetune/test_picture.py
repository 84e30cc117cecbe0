"""The picture of the loss at the end of a run."""

import builtins
import xml.etree.ElementTree

from superoffload.finetune import picture

ENTRIES = [
    {"step": 0, "loss": 3.0},
    {"step": 1, "loss": 2.0},
    {"step": 1, "evaluation_loss": 2.5},
    {"step": 2, "loss": 1.5},
]


def test_it_shows_the_loss_and_what_was_evaluated(tmp_path):
    picture.draw(ENTRIES, tmp_path / "loss.svg")
    drawn = xml.etree.ElementTree.parse(tmp_path / "loss.svg").getroot()
    ids = [element.get("id") or "" for element in drawn.iter()]
    assert len([each for each in ids if each.startswith("line2d")]) >= 2
    picture.draw(ENTRIES, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_what_brings_it(tmp_path, monkeypatch, capsys):
    found = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return found(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    picture.draw(ENTRIES, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
    assert "loss.png is not drawn: pip install matplotlib" in capsys.readouterr().out
