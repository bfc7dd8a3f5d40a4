"""`narrowgauge report` and `narrowgauge watch`: the records of a run as a page, and in the terminal."""
