"""Training of a text-to-image diffusion model in variants of attention, precision and seed."""


class Refusal(ValueError):
    """A request that cannot be met, in one sentence for the user: what was given, what is allowed, what to do."""
