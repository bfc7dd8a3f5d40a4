"""The named optimizers, a file for each family: torch's hyperparameters, order and defaults, and our options."""
