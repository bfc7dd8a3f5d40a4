"""Figures and tables of the papers, measured anew: a folder a study, and what they share."""
