"""Loss scaling: gradients too small for float16, carried through the backward pass and brought back exactly.

Float16 ends at 2^-24 below and at 65504 above. The gradients of a network are small, mean losses make them smaller,
and what falls under half of 2^-24 becomes 0: its weight never learns. Loss scaling (Micikevicius et al.,
2017) multiplies the loss by c before the backward pass and divides the gradients by c after it,

    g = ∂L/∂w = 1/c · ∂(c·L)/∂w

so that every gradient in between is c times larger, and only what lies below 2^-25 / c is lost. The price is at the
other end: what exceeds 65504 / c becomes inf. Three answers to "which c, and what about inf":

- `StaticLossScaler`: c is fixed, and a step with inf or NaN anywhere is skipped whole (the lecture's; c = 8).
- `DynamicLossScaler`: c starts at 65536, is halved by a step with inf or NaN, which is skipped whole, and doubled
  after 2000 good ones in a row. It is `torch.amp.GradScaler` with its arguments checked and its skips counted.
- `TensorLossScaler`: c is fixed, and only the tensors with inf or NaN are skipped (Wortsman et al. 2023,
  Appendix G). One layer that overflows, often the patch embedding, then costs the others neither their step nor
  their scale.

**Rounding.** A power of two for c changes exponents only: scaling rounds nothing that stays in range, and unscaling
returns the very gradient, unless it falls below the format's normal numbers. With any other c the backward pass
rounds elsewhere, as it would for another loss, and unscaling rounds twice, 1/c and the product, both in float32: a
relative error of up to 2^-23, beside the rounding of bfloat16 gradients to their own format. Unscaling in float16
would put the underflow back, so float16 gradients become float32 ones there.

**In the step.** The optimizers of this library unscale while they move their parameters, and see for themselves
what is not finite: `step` leaves all of it to them, unless `unscale_` was called, makes no pass over the gradients,
and leaves those as they are. Under such an optimizer float16 gradients stay float16.

**Waiting for a GPU.** Then nothing waits: steps are skipped, whole or tensor by tensor, on the device. With other
optimizers, and after `unscale_`, per-tensor flags come out of one fused norm, the counters of skips live beside the
gradients, and nothing is read tensor by tensor. `DynamicLossScaler` and `StaticLossScaler` read one number per
device and step, as torch does, to decide about the step. `TensorLossScaler` reads one vector of flags, and nothing
at all with an optimizer of this library under ``nonfinite="skip"``.

The scalers are subclasses of `torch.amp.GradScaler`. The frameworks ask for its methods only; but torch's fused
optimizers, sharding code and some trainers reach for its private attributes, which a look-alike would have to copy.
"""

from narrowgauge.scaling._scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from narrowgauge.scaling._tensor_scaler import TensorLossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "StaticLossScaler", "TensorLossScaler"]
