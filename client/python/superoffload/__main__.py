"""``superoffload COMMAND``, also ``python -m superoffload COMMAND``."""

import importlib
import sys

_COMMANDS = {
    "plan": "superoffload.plan",
    "run": "superoffload.run",
    "finetune": "superoffload.finetune.command",
    "import-checkpoint": "superoffload.import_checkpoint.command",
}


def main() -> int:
    """The exit status: 2 when the command line or what it names is wrong."""
    words = sys.argv[1:]
    if words[:1] and words[0] in _COMMANDS:
        command: int = importlib.import_module(_COMMANDS[words[0]]).main(words[1:])
        return command
    if words == ["--version"]:
        from importlib import metadata

        print(f"superoffload {metadata.version('superoffload')}")
        return 0
    asked = words[:1] in (["--help"], ["-h"])
    usage = (
        "superoffload plan --help                what training a model on a machine would take\n"
        "superoffload finetune --help            a recipe becomes a fine-tuned Hugging Face model\n"
        "superoffload run --help                 a command in whose processes torch's optimizers are superoffload's\n"
        "superoffload import-checkpoint --help   a checkpoint of DeepSpeed becomes one of superoffload's\n"
        "superoffload --version                  the version of this package"
    )
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
