"""open_clip's own training script with SwitchBack layers and StableAdamW.

    python examples/open_clip_switchback.py --model ViT-B-32 --train-data pairs.csv --precision amp_bf16 --lr 1e-3
    python examples/open_clip_switchback.py --smoke

All arguments but --smoke are open_clip's. Guide: docs/guides/open_clip.md.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

from narrowgauge.integrations.open_clip import main

OURS = ["--use-bnb-linear", "SwitchBackLinearGlobal", "--opt", "timm/ngstableadamw"]


def smoke(folder: Path) -> list[str]:
    """Made pictures with captions, a tiny model, and the command line that trains it for an epoch."""
    rows = ["filepath\ttitle"]
    for i, pixels in enumerate(torch.randint(256, (16, 16, 16, 3), dtype=torch.uint8)):
        Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
        rows.append(f"{folder}/{i}.png\tpicture {i}")
    (folder / "pairs.csv").write_text("\n".join(rows))
    vision = {"image_size": 16, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    sizes = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes, "preprocess_cfg": {}}))
    command = f"""--model local-dir:{folder} --train-data {folder}/pairs.csv --logs {folder} --name run --device cpu
        --workers 0 --batch-size 4 --epochs 1 --warmup 1 --lr 1e-3 --precision amp_bf16 --log-every-n-steps 1"""
    return command.split()


if sys.argv[1:] == ["--smoke"]:
    with tempfile.TemporaryDirectory() as folder:
        main([*smoke(Path(folder)), *OURS])
else:
    main([*sys.argv[1:], *OURS])
