"""LoRA by peft on a language model whose frozen layers multiply in 8 bits; the adapters in bf16 with 8-bit states.

    python examples/peft_finetune.py --model meta-llama/Llama-3.2-1B --text book.txt
    python examples/peft_finetune.py --smoke

The adapters are saved as peft saves them. Guide: docs/linear.md, section LoRA.
"""

import argparse
import sys
from pathlib import Path

import peft
import torch
import transformers

import narrowgauge as ng

parser = argparse.ArgumentParser()
parser.add_argument(
    "--model", help="a model of the Hugging Face hub, or a folder", required="--smoke" not in sys.argv
)
parser.add_argument("--text", type=Path, help="the text to learn", required="--smoke" not in sys.argv)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", help="a folder for the adapters")
parser.add_argument("--smoke", action="store_true", help="a tiny model on made text, in seconds")
args = parser.parse_args()

torch.manual_seed(0)
if args.smoke:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
    tokens, length, steps = torch.arange(512) % 7, 32, 10
else:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    tokens, length, steps = torch.tensor(tokenizer(args.text.read_text())["input_ids"]), 512, args.steps
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
for p in model.parameters():  # not buffers: a rotary table must stay float32
    p.data = p.data.to(torch.bfloat16)

config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)  # peft's default makes adapters float32
report = ng.linear.swap_linears(model, ng.linear.SWITCHBACK)
adapters = [p for p in model.parameters() if p.requires_grad]
optimizer = ng.optim.AdamW8bit(adapters, lr=args.lr)
print(f"{len(report.swapped)} layers in 8 bits, {sum(p.numel() for p in adapters):,} parameters to train")

rows = tokens[: len(tokens) // length * length].view(-1, length)
for step in range(steps):
    batch = rows[torch.randint(len(rows), (8,))].to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step}: loss {loss.item():.3f}")
if args.out:
    model.save_pretrained(args.out)
