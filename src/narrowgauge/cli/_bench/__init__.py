"""`narrowgauge bench`: what an optimizer's step and a linear layer cost on this machine."""
