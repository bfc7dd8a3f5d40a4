"""The named optimizers, a file a rule: hyperparameters in torch's order, with torch's defaults, and options."""
