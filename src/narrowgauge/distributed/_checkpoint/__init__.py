"""Crash-safe checkpoints: what `narrowgauge.distributed` saves and loads.

| file | idea |
| --- | --- |
| `_format` | what a checkpoint is on disk, and what is checked of it |
| `_files` | files that are complete or absent, and locks |
| `_directory` | a folder of checkpoints: commit, newest, removal |
| `_coordination` | ranks that check together, and wait for each other in the folder |
| `_state` | a model and an optimizer as named tensors and plain values |
| `_save`, `_load` | the public functions |
"""
