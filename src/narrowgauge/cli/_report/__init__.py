"""Pages: of what the gauges of runs recorded, and of comparisons."""
