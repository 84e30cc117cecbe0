"""What a recipe would take on a machine: memory and time of a step, by superoffload-plan."""

import torch

from superoffload import plan
from superoffload.finetune import hosting
from superoffload.finetune import model as models
from superoffload.finetune.recipe import Recipe
from superoffload.v1 import plan_pb2


def run(recipe: Recipe, machine: str) -> int:
    """Prints the plan; the exit status: 3 when it does not fit. Raises ValueError and Error with a sentence."""
    request = request_of(recipe)
    plan.set_machine(request, machine)
    response = answered(request, recipe)
    print(response.report, end="")
    return 0 if plan.fits(response) else plan.DOES_NOT_FIT


def answered(request: plan_pb2.PlanRequest, recipe: Recipe) -> plan_pb2.PlanResponse:
    """With `weights: auto` as many blocks stream as have to."""
    response = plan.ask(request)
    advice = response.recommendation
    streams = advice.weights == plan_pb2.Recommendation.WEIGHTS_STREAMED and advice.ranks == recipe.ranks
    if recipe.weights == "auto" and not plan.fits(response) and streams:
        request.streamed_weights = advice.streamed_fraction
        response = plan.ask(request)
    return response


def request_of(recipe: Recipe) -> plan_pb2.PlanRequest:
    """All but the machine. Of a sequence that ranks share, each computes a part."""
    if recipe.lora is not None:
        raise ValueError("a plan is of a model whose parameters are all trained: leave lora out")
    config = models.unquantized(models.config_of(recipe, own=recipe.architecture is None))
    with torch.device("meta"):
        model = models.make_random(recipe, config)
    options = hosting.options_of(recipe)
    state_dtype, master_dtype = (options.get(name, torch.float32) for name in ("state_dtype", "master_dtype"))
    eager = models.attention_of(recipe, config) == "eager"
    request = plan_pb2.PlanRequest(
        model=plan.describe(model, config, recipe.model),
        ranks=recipe.ranks,
        batch=recipe.rows_per_pass,
        sequence=recipe.length // recipe.sequence_parallel,
        accumulation=recipe.passes,
        sums_on_host=recipe.passes > 1 and recipe.ranks == 1,
        loss=plan_pb2.LOSS_CHUNKED,
        algorithm=hosting.kind_of(recipe).algorithm.stored_as(state_dtype, "stochastic", master_dtype).daemon_name,
        clipping=recipe.max_grad_norm is not None,
        streamed_weights=1.0 if recipe.weights == "streamed" else 0.0,
    )
    if eager:
        request.attention = plan_pb2.ATTENTION_IMPLEMENTATION_EAGER
    if not recipe.recompute:
        request.checkpointing = plan_pb2.ACTIVATION_CHECKPOINTING_NONE
    return request
