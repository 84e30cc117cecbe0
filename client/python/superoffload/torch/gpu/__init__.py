"""Parameters and gradients that are on a GPU: where they lie, how they move, who waits for whom."""
