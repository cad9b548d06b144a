"""Training of a text-to-image diffusion model in variants of attention, precision and seed."""
