"""``superoffload finetune RECIPE.yaml``: fine-tunes a Hugging Face causal language model. README.md has the fields."""
