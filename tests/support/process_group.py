"""A rank of a run on gloo, from its arguments to its end."""

import datetime
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed


def run_scenarios(train: Callable[[int, dict[str, Any]], Any], seconds: int = 1800) -> None:
    """Joins the group, calls ``train(rank, scenario)`` for each scenario, and saves what it returned.

    The program was run with STORE RANK RANKS OUT SCENARIO..., as rank_processes.py does; a scenario is a JSON object.
    ``seconds``: how long ranks wait for each other.
    """
    store, rank, ranks, out, *scenarios = sys.argv[1:]
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(ranks),
        timeout=datetime.timedelta(seconds=seconds),
    )
    torch.save([train(int(rank), json.loads(scenario)) for scenario in scenarios], out)
    leave()


def leave() -> None:
    """Ends gloo's threads, too: one that is still dropping a tensor when Python ends would abort the process.

    They end with the last reference to their group, of which models and optimizers have some in cycles.
    """
    gc.collect()
    torch.distributed.destroy_process_group()
