"""A ViT of timm's, trained in bf16 with 8-bit states and without fp32 copies of the weights.

    python examples/timm_vit.py --data imagenet/train --model vit_small_patch16_224
    python examples/timm_vit.py --smoke

The folder has a subfolder of pictures for each class. Guide: docs/guides/timm.md.
"""

import argparse
import sys

import timm
import timm.optim
import torch
from timm.scheduler import CosineLRScheduler
from torchvision import datasets, transforms

import narrowgauge as ng
from narrowgauge.integrations.timm import register

register()

parser = argparse.ArgumentParser()
parser.add_argument(
    "--data", help="a folder with a subfolder of pictures for each class", required="--smoke" not in sys.argv
)
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--opt", default="ngadamw8bit")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--smoke", action="store_true", help="a tiny model on made pictures, in seconds")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
size, batch = (32, 16) if args.smoke else (224, 256)
prepare = transforms.Compose([transforms.RandomResizedCrop(size), transforms.ToTensor()])
if args.smoke:
    data = datasets.FakeData(64, (3, size, size), num_classes=4, transform=prepare)
    model = timm.create_model(
        args.model, num_classes=4, img_size=size, patch_size=16, embed_dim=32, depth=2, num_heads=2
    )
else:
    data = datasets.ImageFolder(args.data, prepare)
    model = timm.create_model(args.model, num_classes=len(data.classes))
ng.recipes.cast(model.to(device), torch.bfloat16)  # not its buffers: batch norms need theirs in float32

optimizer = timm.optim.create_optimizer_v2(model, args.opt, lr=args.lr, weight_decay=0.05, layer_decay=0.75)
loader = torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=0 if args.smoke else 8)
epochs = 1 if args.smoke else args.epochs
# The learning rates of the layers are set by timm's schedules alone.
total = epochs * len(loader)
schedule = CosineLRScheduler(optimizer, t_initial=total, warmup_t=total // 20, t_in_epochs=False)
step = 0
for epoch in range(epochs):
    for images, labels in loader:
        logits = model(images.to(device, torch.bfloat16))
        loss = torch.nn.functional.cross_entropy(logits.float(), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        schedule.step_update(step)
    print(f"epoch {epoch}: loss {loss.item():.3f}")
print(f"{optimizer.state_bytes() / sum(p.numel() for p in model.parameters()):.2f} bytes of states a parameter")
