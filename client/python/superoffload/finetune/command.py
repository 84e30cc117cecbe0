"""The command line of ``superoffload finetune``."""

import argparse
import pathlib
import sys

from superoffload._core import extras
from superoffload._core.error import Error
from superoffload.finetune import recipe as recipes

_NEEDED = ("torch", "transformers", "accelerate", "yaml")


def main(words: list[str]) -> int:
    """The exit status: 2 when the recipe is wrong or something is missing, 1 when the daemon cannot do it."""
    parser = argparse.ArgumentParser(
        prog="superoffload finetune",
        description="Fine-tunes a Hugging Face causal language model as a recipe says. The same command again goes on "
        "where a process was killed.",
        epilog="They are " + ", ".join(f"{name} ({path})" for name, path in recipes.published().items()),
    )
    parser.add_argument(
        "recipe",
        type=pathlib.Path,
        metavar="RECIPE",
        help="a YAML file (its fields: superoffload/finetune/README.md), or a name of those that come with the package",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--plan", action="store_true", help="print the memory and the time of a step, and do nothing")
    other.add_argument("--dry-run", action="store_true", help="check all that can be checked before a model is loaded")
    other.add_argument(
        "--miniature",
        action="store_true",
        help="train a small model of the same architecture, and compare with torch.optim",
    )
    parser.add_argument("--machine", default="gh200-96-480", help="for --plan; as of superoffload plan")
    given = parser.parse_args(words)
    try:
        for module in _NEEDED:
            extras.need(module, "finetune")
        recipe = recipes.read(given.recipe)
        if given.plan:
            from superoffload.finetune import planning

            return planning.run(recipe, given.machine)
        if given.dry_run:
            from superoffload.finetune import checks

            return checks.run(recipe)
        return _run(recipe, words, given.miniature)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"superoffload finetune: {error}", file=sys.stderr)
        return 2
    except Error as error:
        print(f"superoffload finetune: {error.message}", file=sys.stderr)
        return 1


def _run(recipe: recipes.Recipe, words: list[str], small: bool) -> int:
    from superoffload.finetune import job, miniature, ranks

    if not ranks.are_started(recipe):
        return ranks.start(recipe, words)
    joined = ranks.join(recipe)
    try:
        return (miniature if small else job).run(recipe, joined)
    finally:
        joined.leave()
