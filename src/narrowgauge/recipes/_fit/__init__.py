"""Fitting a recipe to a model: a short probe on the user's data, then a choice for each parameter and layer."""
