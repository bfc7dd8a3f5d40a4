"""A rule of your own: AdaBelief with 24-bit weights and 8-bit states, beside its equation in float64.

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) (g - m)^2
    delta = -lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    python examples/own_rule.py             # 1000 steps
    python examples/own_rule.py --smoke     # 100

Source: Zhuang et al. 2020, Algorithm 2, without the eps that it adds to v. Guide: docs/add_a_rule.md
"""

import sys

import torch

import narrowgauge as ng


class AdaBelief(ng.rules.Rule):
    """The equation above."""

    name = "adabelief"
    moments = (ng.rules.Slot("m", signed=True, normalizer="v"), ng.rules.Slot("v", signed=False))
    averaging = ("beta1", "new_weight1", "beta2", "new_weight2")

    def scalars(self, group, step):
        beta1, beta2 = group["betas"]
        averages = {"beta1": beta1, "new_weight1": 1 - beta1, "beta2": beta2, "new_weight2": 1 - beta2}
        corrections = {"correction1": 1 - beta1**step, "correction2": 1 - beta2**step}
        return {"lr": group["lr"], "eps": group["eps"], **averages, **corrections}

    def direction(self, arithmetic, weight, grad, moments, s):
        m = arithmetic.accumulate(moments["m"], grad, s["beta1"], s["new_weight1"])
        surprise = grad - arithmetic.value(m)
        v = arithmetic.accumulate_square(moments["v"], surprise, s["beta2"], s["new_weight2"])
        root = arithmetic.root(arithmetic.value(v), s["correction2"]) + s["eps"]
        return arithmetic.value(m) / s["correction1"] / root, {"m": m, "v": v}


class AdaBeliefOptimizer(ng.optim.NarrowOptimizer):
    """Its optimizer, which makes the rule known by its name."""

    rule = AdaBelief()

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, **options):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, options)


torch.manual_seed(0)
steps = 100 if "--smoke" in sys.argv else 1000
weight = torch.nn.Parameter(torch.randn(64, 128).bfloat16())
optimizer = AdaBeliefOptimizer([weight], weights="split8", states="log8")
start = w = weight.detach().double()
m = v = torch.zeros_like(w)
for t in range(1, steps + 1):
    x = torch.randn(32, 64).bfloat16()
    loss = (x @ weight - x.sum(1, keepdim=True).sin()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    g = weight.grad.double()  # both take the same gradients: only the numbers that are stored differ
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * (g - m) ** 2
    w = w - 1e-3 * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
distance = (optimizer.full_weights()[weight] - w).norm() / (w - start).norm()
print(f"loss {loss.item():.3f}; the ends are {distance:.2%} of the way apart")

# A group of another optimizer may name the rule.
one, other = (torch.nn.Parameter(torch.randn(64, 128)) for _ in range(2))
mixed = ng.optim.Lion(
    [{"params": [one]}, {"params": [other], "rule": "adabelief", "lr": 1e-3}], lr=1e-4, states="log8"
)
one.grad, other.grad = torch.randn_like(one), torch.randn_like(other)
mixed.step()
print(mixed.describe())
